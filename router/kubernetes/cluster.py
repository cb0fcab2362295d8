"""The API server as one client, in one namespace: the pod's own account, bounded tries, errors for people.

    ask ──▶ answer
     ├── busy (429), broken (500, 502, 503, 504) or out of reach ──▶ again, at most _TRIES times ──▶ ClusterError
     ├── 404 Missing, 409 Conflict ──▶ the caller knows what they mean
     └── any other refusal ──▶ ClusterError at once, in the server's words

Each request may be repeated: all that the router writes is either guarded by a resourceVersion or the same twice.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from router.autoscaler.actuator import ActuatorError
from router.kubernetes.objects import Event, Status
from serving.settings import SettingsError

MERGE_PATCH = "application/merge-patch+json"
_TRIES = 3
_TRY_S = 5.0
_WAIT_S = 0.2
_MAX_WAIT_S = 2.0
"""A server that wants more time than this is left alone by whoever asks: the autoscaler and the watches wait longer."""
_AGAIN = frozenset({429, 500, 502, 503, 504})
_WATCH_S = 60
"""A watch is begun anew so often: a connection that has died in silence is noticed then."""
_WATCH_MARGIN_S = 10.0

T = TypeVar("T")
Query = Mapping[str, str]


class ClusterError(ActuatorError):
    """The API server does not answer, or refuses; the message says what was asked and why not."""


class Missing(ClusterError):
    """There is no such object."""


class Conflict(ClusterError):
    """It has been changed by somebody else, or is there already."""


class _TryAgain(ClusterError):
    """It may be otherwise in a moment."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Cluster:
    """Made on the running event loop; `close` it there."""

    def __init__(self, account_folder: str, namespace: str = "", environment: Mapping[str, str] = os.environ) -> None:
        """`namespace`: empty for the account's own. Raises SettingsError outside of a pod."""
        folder = Path(account_folder)
        configuration = Configuration()
        try:
            loader = InClusterConfigLoader(str(folder / "token"), str(folder / "ca.crt"), environ=environment)
            loader.load_and_set(configuration)
            self.namespace = namespace or (folder / "namespace").read_text().strip()
        except (ConfigException, OSError) as error:
            raise SettingsError(
                f"this router has no account of a Kubernetes cluster ({error}): let it run in a pod with "
                f"automountServiceAccountToken, or leave out the section kubernetes and kubernetes: in pools "
                f"(account_folder is {account_folder})"
            ) from error
        self._client = ApiClient(configuration)
        self._client.user_agent = "tandem-router"

    async def close(self) -> None:
        """Ends what is left of its requests."""
        await self._client.close()

    def path(self, group: str, plural: str, *parts: str) -> str:
        """Of a resource in the namespace, or of an object there: path("apps/v1", "deployments", "decode", "scale")."""
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        return "/".join((f"{root}/namespaces/{self.namespace}/{plural}", *parts))

    async def ask(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> T:
        """What the server answers, as far as `answer` has it. Raises ClusterError."""
        for tried in range(1, _TRIES + 1):
            try:
                return msgspec.json.decode(await self._once(method, path, query, body, content_type), type=answer)
            except _TryAgain as error:
                if tried == _TRIES:
                    raise
                backoff_s = _WAIT_S * 2**tried * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(backoff_s if error.wait_s is None else error.wait_s, _MAX_WAIT_S))
            except msgspec.DecodeError as error:
                raise ClusterError(f"Kubernetes answers {method} {path} with something else: {error}") from error
        raise AssertionError("the last try returns or raises")

    async def watch(self, path: str, query: Query, revision: str) -> AsyncGenerator[Event, None]:
        """What happens there after `revision`. Ends by itself after a minute. Raises ClusterError where it breaks."""
        told = {**query, "watch": "true", "resourceVersion": revision, "allowWatchBookmarks": "true"}
        told["timeoutSeconds"] = str(_WATCH_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TRY_S, sock_read=_WATCH_S + _WATCH_MARGIN_S)
        try:
            response = await self._requested("GET", path, told, None, "application/json", timeout)
            async with response:
                if response.status != 200:
                    raise _refusal("watch", path, response, await response.read())
                async for line in response.content:
                    yield msgspec.json.decode(line, type=Event)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, ValueError) as error:
            raise ClusterError(f"the watch of {path} broke: {str(error) or type(error).__name__}") from error

    async def _once(self, method: str, path: str, query: Query | None, body: Any, content_type: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=_TRY_S)
        try:
            response = await self._requested(method, path, query, body, content_type, timeout)
            async with response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or f"no answer within {_TRY_S:g} s"
            raise _TryAgain(f"Kubernetes cannot be reached to {method} {path}: {why}") from error
        if not 200 <= response.status < 300:
            raise _refusal(method, path, response, content)
        return content

    async def _requested(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: Any,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        answered = await self._client.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answered.response
        return response


def _refusal(method: str, path: str, response: aiohttp.ClientResponse, content: bytes) -> ClusterError:
    try:
        why = msgspec.json.decode(content, type=Status).message
    except msgspec.DecodeError:
        why = ""
    told = f"Kubernetes refuses to {method} {path} ({response.status}): {why or response.reason}"
    if response.status in _AGAIN:
        wait = response.headers.get("Retry-After", "")
        return _TryAgain(told, float(wait) if wait.isdecimal() else None)
    if response.status in (401, 403):
        told += "; the rights that the router needs are in docs/kubernetes.md"
    return {404: Missing, 409: Conflict}.get(response.status, ClusterError)(told)
