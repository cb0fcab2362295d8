"""A client of the API server, in one namespace: the pod's own account, bounded retries, errors that say what to do.

    request ──▶ answer
     ├── busy (429), failing (500, 502, 503, 504) or unavailable ──▶ retried, at most _TRIES times ──▶ ClusterError
     ├── 404 Missing, 409 Conflict ──▶ the caller handles them
     └── any other refusal ──▶ ClusterError at once, with the server's message

Each request may be repeated: all writes of the router are either guarded by a resourceVersion or idempotent.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from router.autoscaler.resizer import ActuatorError
from serving.settings import SettingsError

T = TypeVar("T")

# What the router reads of Kubernetes' objects; other fields are ignored. Go writes empty lists as null and omits zeros.


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of any object, and of a list."""

    name: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class Listed(msgspec.Struct, Generic[T], frozen=True):
    metadata: Metadata
    items: list[T] | None = None


class ScaleSpec(msgspec.Struct, frozen=True):
    replicas: int = 0


class ScaleStatus(msgspec.Struct, frozen=True):
    selector: str = ""
    """Of the pods."""


class Scale(msgspec.Struct, frozen=True):
    """The subresource of a Deployment or StatefulSet."""

    metadata: Metadata
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()

    @property
    def size(self) -> int:
        """The desired number of pods."""
        return self.spec.replicas


class PodIP(msgspec.Struct, frozen=True):
    ip: str


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class PodStatus(msgspec.Struct, frozen=True, rename={"pod_ips": "podIPs"}):
    pod_ips: list[PodIP] | None = None
    conditions: list[Condition] | None = None

    @property
    def unscheduled(self) -> str | None:
        """Why no node takes the pod; None: one does, or it has not been tried."""
        found = [one for one in self.conditions or () if one.type == "PodScheduled" and one.status == "False"]
        return found[0].message if found else None


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: PodStatus = PodStatus()


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Times are RFC 3339 with microseconds, by the clock of the writer."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


class Conditions(msgspec.Struct, frozen=True):
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    conditions: Conditions = Conditions()


class EndpointSlice(msgspec.Struct, frozen=True):
    """Some of the pods behind a Service."""

    metadata: Metadata
    endpoints: list[Endpoint] | None = None

    @property
    def staying(self) -> frozenset[str]:
        """IP addresses of the pods that do not terminate, ready or not."""
        endpoints = self.endpoints or ()
        return frozenset(ip for one in endpoints if not one.conditions.terminating for ip in one.addresses)


class Event(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: msgspec.Raw


class Status(msgspec.Struct, frozen=True):
    """Comes in place of an object that is unavailable."""

    message: str = ""
    code: int = 0


MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply: the sender becomes an owner of the fields, also of those that have their value already."""
_TRIES = 3
_TRY_S = 5.0
_WAIT_S = 0.2
_MAX_WAIT_S = 2.0
"""A server that asks for a longer pause gets it from the callers: the autoscaler and the watches wait longer."""
_RETRYABLE_STATUS = frozenset({429, 500, 502, 503, 504})
_WATCH_S = 60
"""A watch is restarted this often, so that a silently dead connection is noticed."""
_WATCH_MARGIN_S = 10.0

_FAILURES = (aiohttp.ClientError, OSError, ConfigException, ValueError, RuntimeError)
"""Of a request that is not sent or not answered. Besides the network's: the token file is empty or has a line feed in
the middle, or the client is closed."""

Query = Mapping[str, str]


class ClusterError(ActuatorError):
    """The API server does not answer, or refuses; the message names the request and the reason."""


class Missing(ClusterError):
    """The object does not exist."""


class Conflict(ClusterError):
    """The object has been changed meanwhile, or exists already."""


class _Retryable(ClusterError):
    """A retry may succeed."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _Account(InClusterConfigLoader):  # type: ignore[misc]
    """A line feed at the end of the token file is not part of the token."""

    token: str

    def _read_token_file(self) -> None:
        super()._read_token_file()
        self.token = self.token.strip()


class Cluster:
    """Made on the running event loop; `close` it there."""

    def __init__(self, account_folder: str, namespace: str = "", environment: Mapping[str, str] = os.environ) -> None:
        """`namespace`: empty for the account's own. Raises SettingsError outside of a pod."""
        folder = Path(account_folder)
        configuration = Configuration()
        configuration.client_session_kwargs = {"trust_env": False}  # a proxy of the environment is for the hub
        try:
            loader = _Account(str(folder / "token"), str(folder / "ca.crt"), environ=environment)
            loader.load_and_set(configuration)
            self.namespace = namespace or (folder / "namespace").read_text().strip()
        except (ConfigException, OSError) as error:
            raise SettingsError(
                f"this router has no account of a Kubernetes cluster ({error}): run it in a pod with "
                f"automountServiceAccountToken, or leave out the section kubernetes and kubernetes: in pools "
                f"(account_folder is {account_folder})"
            ) from error
        self._client = ApiClient(configuration)
        self._client.user_agent = "tandem-router"

    async def close(self) -> None:
        """Cancels the requests that are open."""
        await self._client.close()

    def path(self, group: str, plural: str, *parts: str) -> str:
        """Of a resource in the namespace, or of an object there: path("apps/v1", "deployments", "decode", "scale")."""
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        return "/".join((f"{root}/namespaces/{self.namespace}/{plural}", *parts))

    async def request(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = MERGE_PATCH,
    ) -> T:
        """What the server answers, as far as `answer` has it. `content_type`: of the `body`. Raises ClusterError."""
        for attempt in range(1, _TRIES + 1):
            try:
                return msgspec.json.decode(await self._attempt(method, path, query, body, content_type), type=answer)
            except _Retryable as error:
                if attempt == _TRIES:
                    raise
                backoff_s = _WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(backoff_s if error.wait_s is None else error.wait_s, _MAX_WAIT_S))
            except msgspec.DecodeError as error:
                raise ClusterError(f"Kubernetes answers {method} {path} with something else: {error}") from error
        raise AssertionError("the last try returns or raises")

    async def watch(self, path: str, query: Query, revision: str) -> AsyncGenerator[Event, None]:
        """The events after `revision`. Ends by itself after a minute. Raises ClusterError where it breaks."""
        parameters = {**query, "watch": "true", "resourceVersion": revision, "allowWatchBookmarks": "true"}
        parameters["timeoutSeconds"] = str(_WATCH_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TRY_S, sock_read=_WATCH_S + _WATCH_MARGIN_S)
        try:
            response = await self._send("GET", path, parameters, None, timeout)
            async with response:
                if response.status != 200:
                    raise _refusal("watch", path, response, await response.read())
                async for line in response.content:
                    yield msgspec.json.decode(line, type=Event)
        except (*_FAILURES, msgspec.DecodeError) as error:
            raise ClusterError(f"the watch of {path} broke: {str(error) or type(error).__name__}") from error

    async def _attempt(self, method: str, path: str, query: Query | None, body: Any, content_type: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=_TRY_S)
        try:
            response = await self._send(method, path, query, body, timeout, content_type)
            async with response:
                content = await response.read()
        except _FAILURES as error:
            why = str(error) or f"no answer within {_TRY_S:g} s"
            raise _Retryable(f"Kubernetes cannot be reached to {method} {path}: {why}") from error
        if not 200 <= response.status < 300:
            raise _refusal(method, path, response, content)
        return content

    async def _send(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: Any,
        timeout: aiohttp.ClientTimeout,
        content_type: str = MERGE_PATCH,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": "application/json" if body is None else content_type}
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
    message = f"Kubernetes refuses to {method} {path} ({response.status}): {why or response.reason}"
    if response.status in _RETRYABLE_STATUS:
        wait = response.headers.get("Retry-After", "")
        return _Retryable(message, float(wait) if wait.isdecimal() else None)
    if response.status in (401, 403):
        message += "; the rights that the router needs are in docs/kubernetes/security.md"
    return {404: Missing, 409: Conflict}.get(response.status, ClusterError)(message)
