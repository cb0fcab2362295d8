"""envoy.service.ext_proc.v3.ExternalProcessor: picks the router that a Gateway sends a request to, as the endpoint
picker of an InferencePool over the routers (docs/decisions/0013-endpoint-picker.md).

    headers ──a JSON body follows, in full duplex──▶ chunks ──the last one──▶ key of the conversation
       └────────────anything else──────────▶ no key ──▶ routers, best first ◀─────────┘
                                                             └──▶ answer, chunks as they were, end of the stream

The stream ends with the request: Envoy then proceeds alone, and no token passes here. Every router picks alike.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.struct_pb2 import ListValue, Struct

from protos.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from serving.errors import InvalidArgument
from serving.interceptor import Context
from serving.limits import LARGE_BYTES, start_in_thread
from serving.settings import Address, Section, setting

SERVICE = ext_proc.DESCRIPTOR.services_by_name["ExternalProcessor"]
HEADER = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
_FULL_DUPLEX = 4
_REPLACED = 2
_HELD_BYTES = 1 << 20
"""Of a body: a longer one goes on as it comes, without a key."""
_KEY_CHARS = 4096
"""Of a prompt without messages, whose next turn begins alike; what is the same in every turn is not cut."""


class EndpointPickerSettings(Section):
    """The endpoint picker of an InferencePool, for Gateways of the Gateway API inference extension."""

    listen: Address | None = setting(
        None,
        "host:port on which Gateways ask which router a request of OpenAI's API goes to (Envoy's ext_proc); needs "
        "http.listen and signals.routers; none: not served. With TLS it requires no certificate.",
    )


class RouterEndpoint(NamedTuple):
    """A router that a request may go to."""

    address: str
    """host:port of its HTTP API."""
    num_queued: int
    """Requests that wait there for admission."""


@dataclass(frozen=True, slots=True)
class EndpointPicker:
    """Belongs to one event loop."""

    routers: Callable[[], Sequence[RouterEndpoint]]

    async def Process(
        self, requests: AsyncIterator[ext_proc.ProcessingRequest], context: Context
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("request") != "request_headers":
            raise InvalidArgument("the stream begins with something else than the headers of a request")
        held = [part async for part in _beginning_of(requests)] if _body_comes(first) else []
        body = b"".join(part.request_body.body for part in held)
        read = partial(conversation, body)  # of any client: a Gateway asks before the router checks a token
        key = await start_in_thread(read, "read a body") if len(body) >= LARGE_BYTES else read()
        allowed = _subset(first.metadata_context)
        candidates = [one for one in self.routers() if allowed is None or one.address in allowed]
        if not candidates:
            yield _unavailable(
                "no router serves" if allowed is None else "none of the endpoints is a router that serves"
            )
            return
        yield _destination(in_order(candidates, key or secrets.token_hex(8)))
        for part in held:
            yield _continued(part)
        if held and not _is_last(held[-1]):
            async for part in requests:
                yield _continued(part)
                if _is_last(part):
                    return


async def _beginning_of(
    requests: AsyncIterator[ext_proc.ProcessingRequest],
) -> AsyncIterator[ext_proc.ProcessingRequest]:
    """Parts of a body to its end, or until they are as many bytes as are held back for a pick."""
    num_bytes = 0
    async for part in requests:
        yield part
        num_bytes += len(part.request_body.body)
        if _is_last(part) or num_bytes > _HELD_BYTES:
            return


def _is_last(part: ext_proc.ProcessingRequest) -> bool:
    return part.request_body.end_of_stream or part.HasField("request_trailers")


def in_order(routers: Iterable[RouterEndpoint], key: str) -> list[str]:
    """Addresses, best first: fewest queued requests, and of equal ones the one that `key` belongs to. A router that
    comes or goes moves no other conversations than its own (rendezvous hashing)."""

    def weight(router: RouterEndpoint) -> bytes:
        return hashlib.sha256(f"{router.address} {key}".encode()).digest()

    return [one.address for one in sorted(routers, key=lambda one: (one.num_queued, weight(one)))]


def conversation(body: bytes) -> str | None:
    """What all turns of one conversation have in common: `prompt_cache_key`, or the beginning of the messages or of the
    prompt. None: nothing, or no whole JSON object, or one that is nested too deeply."""
    try:
        fields = json.loads(body)
        return _key(fields) if isinstance(fields, dict) else None
    except (ValueError, RecursionError):
        return None


def _key(fields: dict[str, Any]) -> str | None:
    if isinstance(session := fields.get("prompt_cache_key"), str) and session:
        return json.dumps(session)  # which may have surrogates
    for name in ("messages", "input", "prompt"):
        if found := fields.get(name):
            return _beginning(found)
    return None


def _beginning(prompt: Any) -> str:
    """Of messages those up to the user's first, whole: a long system message is common to many conversations."""
    if isinstance(prompt, list):
        is_users = [isinstance(one, dict) and one.get("role") == "user" for one in prompt]
        if True in is_users:
            return hashlib.sha256(json.dumps(prompt[: is_users.index(True) + 1]).encode()).hexdigest()
    return json.dumps(prompt[:_KEY_CHARS] if isinstance(prompt, list) else prompt)[:_KEY_CHARS]


def _body_comes(first: ext_proc.ProcessingRequest) -> bool:
    """Whether a body with a prompt follows that may be awaited before the headers are answered."""
    headers = first.request_headers
    if headers.end_of_stream:
        return False
    if first.HasField("protocol_config") and first.protocol_config.request_body_mode != _FULL_DUPLEX:
        return False
    values = {one.key: one.raw_value or one.value.encode() for one in headers.headers.headers}
    return values.get("content-type", b"").startswith(b"application/json")


def _subset(metadata: ext_proc.Metadata) -> frozenset[str] | None:
    """The endpoints to which the proxy restricts the pick; None: all."""
    hint = metadata.filter_metadata.get("envoy.lb.subset_hint")
    if hint is None or SUBSET not in hint:
        return None
    listed = hint[SUBSET]
    parts = map(str, listed) if isinstance(listed, ListValue) else str(listed).split(",")
    return frozenset(part.strip() for part in parts)


def _destination(addresses: Sequence[str]) -> ext_proc.ProcessingResponse:
    value = ",".join(addresses)
    header = ext_proc.HeaderValue(key=HEADER, raw_value=value.encode())
    mutation = ext_proc.HeaderMutation(set_headers=[ext_proc.HeaderValueOption(header=header, append_action=_REPLACED)])
    metadata = Struct()
    metadata.update({"envoy.lb": {HEADER: value}})
    common = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    headers = ext_proc.HeadersResponse(response=common)
    return ext_proc.ProcessingResponse(request_headers=headers, dynamic_metadata=metadata)


def _continued(part: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
    """The part as it was."""
    if part.HasField("request_trailers"):
        return ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())
    chunk = ext_proc.StreamedBodyResponse(body=part.request_body.body, end_of_stream=part.request_body.end_of_stream)
    common = ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=chunk))
    return ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=common))


def _unavailable(why: str) -> ext_proc.ProcessingResponse:
    code = ext_proc.HttpStatus(code=503)
    response = ext_proc.ImmediateResponse(status=code, body=why.encode(), details="tandem_endpoint_picker")
    return ext_proc.ProcessingResponse(immediate_response=response)
