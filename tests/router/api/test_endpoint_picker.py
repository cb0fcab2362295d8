"""The endpoint picker of an InferencePool over the routers: a client of Envoy's ext_proc, as a Gateway is one."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import httpx
import pytest

from protos.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from protos.envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc
from protos.tandem.v1 import pools_pb2, pools_pb2_grpc
from router.api import endpoint_picker
from router.api.endpoint_picker import HEADER, SUBSET, EndpointPickerSettings, RouterEndpoint, conversation, in_order
from router.app import RouterApp
from router.request.validation import ServedModel
from router.settings import RouterSection, RouterSettings
from serving.channel import open_channel
from serving.limits import LARGE_BYTES
from tandem.local_stack.topology import free_ports
from tests.channels import PATIENT
from tests.router.rig import SHORT, TIMEOUT_S, running, settings_of
from tests.waiting import until

HOSTS = ("127.0.0.1", "127.0.0.2")
JSON = {"content-type": "application/json"}
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
LONG, OTHER = {"role": "system", "content": "s" * 5000}, {"role": "user", "content": "b"}


def sections(host: str, signals: int, http: int, picker: int) -> dict[str, Any]:
    """Of a router at `host`, one of two."""
    routers = ",".join(f"{one}:{signals}" for one in HOSTS)
    return {
        "router": {"admin_listen": f"{host}:0"},
        "http": {"listen": f"{host}:{http}"},
        "signals": {"listen": f"{host}:{signals}", "routers": routers, "interval_s": 2.0},
        "endpoint_picker": {"listen": f"{host}:{picker}"},
        "picking": {"decode_scorers": "queue=1,session=5"},
        "disaggregation": {"mode": "never"},
    }


@asynccontextmanager
async def two_routers(
    model: ServedModel, folder: Path, num_decode: int = 1, *, both_serve: bool = True
) -> AsyncIterator[dict[str, RouterApp]]:
    """By the address of their HTTP API, when they know each other. The second one may have no instances."""
    signals, http, picker = free_ports(3)
    async with running(model, folder, prefill=0, decode=num_decode, **sections(HOSTS[0], signals, http, picker)) as rig:
        settings = settings_of(
            folder, rig.prefill, rig.decode if both_serve else [], **sections(HOSTS[1], signals, http, picker)
        )
        second = RouterApp(settings, model)
        await second.start()
        try:
            apps = (rig.app, second)
            if both_serve:
                await until(lambda: all(len(app._endpoints()) == len(HOSTS) for app in apps))
            else:
                await until(lambda: all(len(app.peers.hosts) == len(HOSTS) for app in apps))
            yield {str(app.http_address): app for app in apps}
        finally:
            await second.stop()


async def answers(app: RouterApp, parts: Sequence[ext_proc.ProcessingRequest]) -> list[ext_proc.ProcessingResponse]:
    """To the whole stream; the router ends it."""
    async with open_channel(str(app.endpoint_picker_address), PATIENT) as channel:
        call = ext_proc_grpc.ExternalProcessorStub(channel).Process(iter(parts), timeout=TIMEOUT_S)
        return [answer async for answer in call]


def headers(values: dict[str, str] = JSON, *, end: bool = False, **fields: Any) -> ext_proc.ProcessingRequest:
    listed = [ext_proc.HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()]
    whole = ext_proc.HttpHeaders(headers=ext_proc.HeaderMap(headers=listed), end_of_stream=end)
    return ext_proc.ProcessingRequest(request_headers=whole, **fields)


def body(data: bytes, num_chunks: int = 1, *, end: bool = True) -> list[ext_proc.ProcessingRequest]:
    size = -(-len(data) // num_chunks)
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    ends = [end and at == len(chunks) - 1 for at in range(len(chunks))]
    wholes = [ext_proc.HttpBody(body=chunk, end_of_stream=last) for chunk, last in zip(chunks, ends, strict=True)]
    return [ext_proc.ProcessingRequest(request_body=one) for one in wholes]


def endpoints(answer: ext_proc.ProcessingResponse) -> list[str]:
    """Of the header and of the metadata, which agree."""
    [option] = answer.request_headers.response.header_mutation.set_headers
    assert (option.header.key, option.append_action) == (HEADER, 2)
    metadata: Any = answer.dynamic_metadata
    assert metadata["envoy.lb"][HEADER] == option.header.raw_value.decode()
    return option.header.raw_value.decode().split(",")


def with_subset(allowed: list[str] | str) -> ext_proc.Metadata:
    metadata = ext_proc.Metadata()
    metadata.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: allowed})
    return metadata


async def picked(app: RouterApp, asked: dict[str, Any]) -> list[str]:
    return endpoints((await answers(app, [headers(), *body(json.dumps(asked).encode())]))[0])


async def known_instances(app: RouterApp, session: str) -> set[str]:
    """Instances that `pools explain` prefers at this router for the session."""
    async with open_channel(str(app.admin_address), PATIENT) as channel:
        stub = pools_pb2_grpc.PoolsServiceStub(channel)
        explained = await stub.ExplainPick(pools_pb2.ExplainPickRequest(session=session), timeout=TIMEOUT_S)
    known = [(one, part.value) for one in explained.decode for part in one.parts if part.scorer == "session"]
    assert len(known) == len(explained.decode)
    is_known = len({value for _, value in known}) > 1
    return {one.instance_id for one, value in known if is_known and value == 0.0 and one.picked}


async def test_a_conversation_returns_to_the_router_whose_explain_names_its_instance(
    model: ServedModel, model_folder: Path
) -> None:
    async with two_routers(model, model_folder, num_decode=3) as routers, httpx.AsyncClient(trust_env=False) as http:
        met: set[str] = set()
        for number in range(64):
            if len(met) == len(routers):
                break
            session = f"customer-{number}"
            asked = {"model": "fake", "prompt": SHORT, "max_tokens": 2, "prompt_cache_key": session}
            picks = [await picked(app, asked) for app in routers.values()]
            assert picks[0] == picks[1]
            first, other = picks[0]
            answer = await http.post(f"http://{first}/v1/completions", json=asked, timeout=TIMEOUT_S)
            assert answer.status_code == 200
            assert await known_instances(routers[first], session) == {answer.headers["tandem-decode"]}
            assert await known_instances(routers[other], session) == set()
            assert await picked(routers[other], {**asked, "prompt": [*SHORT, 7]}) == picks[0]
            met.add(first)
        assert met == routers.keys()


async def test_a_gateway_gets_its_endpoints_its_body_back_and_failures_for_the_client(
    model: ServedModel, model_folder: Path
) -> None:
    async with two_routers(model, model_folder) as routers:
        address, app = next(iter(routers.items()))
        # STEP the body comes back as it was, and the stream ends with the request
        data = json.dumps({"messages": [USER], "user": "x" * 900}).encode()
        first, *rest = await answers(app, [headers(), *body(data, 5)])
        assert set(endpoints(first)) == routers.keys()
        chunks = [one.request_body.response.body_mutation.streamed_response for one in rest]
        assert b"".join(chunk.body for chunk in chunks) == data
        assert [chunk.end_of_stream for chunk in chunks] == [False] * 4 + [True]
        trailers = ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())
        *_, last = await answers(app, [headers(), *body(data, 2, end=False), trailers])
        assert last.WhichOneof("response") == "request_trailers"
        # STEP what has no prompt, or may not be awaited, is answered at its headers
        buffered = ext_proc.ProtocolConfiguration(request_body_mode=2)
        grpc_type = {"content-type": "application/grpc"}
        for one in (headers(end=True), headers(grpc_type), headers(protocol_config=buffered)):
            [answer] = await answers(app, [one])
            assert set(endpoints(answer)) == routers.keys()
        # STEP the proxy may restrict the endpoints
        for allowed in (["10.0.0.1:8000", address], f"10.0.0.1:8000, {address}"):
            [answer] = await answers(app, [headers(end=True, metadata_context=with_subset(allowed))])
            assert endpoints(answer) == [address]
        [answer] = await answers(app, [headers(end=True, metadata_context=with_subset(["10.0.0.1:8000"]))])
        assert answer.immediate_response.status.code == 503
        # STEP a body that is too long to be held goes on as it comes
        long = b"x" * (3 << 20)
        first, *rest = await answers(app, [headers(), *body(long, 48)])
        assert set(endpoints(first)) == routers.keys()
        assert b"".join(one.request_body.response.body_mutation.streamed_response.body for one in rest) == long
        # STEP and a stream begins with headers
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answers(app, body(b"{}"))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_that_does_not_serve_gets_no_request(model: ServedModel, model_folder: Path) -> None:
    async with two_routers(model, model_folder, both_serve=False) as routers:
        (address, serving), (_, other) = routers.items()
        assert serving.is_ready()
        assert not other.is_ready()
        await until(lambda: all([one.address for one in app._endpoints()] == [address] for app in routers.values()))
        for app in routers.values():
            [answer] = await answers(app, [headers(end=True)])
            assert endpoints(answer) == [address]


@pytest.mark.parametrize(("listen", "is_known"), [(HOSTS[0], True), ("0.0.0.0", False), ("[::]", False)])
async def test_a_router_that_its_discovery_does_not_have_yet_is_picked_where_its_picker_listens(
    model: ServedModel, model_folder: Path, listen: str, is_known: bool
) -> None:
    """As after an install, while the cluster's DNS answers that there is no router."""
    signals, http, picker = free_ports(3)
    own = sections(HOSTS[0], signals, http, picker)
    own["signals"]["routers"] = f"{HOSTS[1]}:{signals}"
    own["endpoint_picker"]["listen"] = f"{listen}:{picker}"
    own["server"] = {"drain_accept_s": 0.0, "drain_grace_s": 2.0, "allow_plaintext": True}
    async with running(model, model_folder, prefill=0, decode=1, **own) as rig:
        await until(rig.app.is_serving)
        assert [one.address for one in rig.app._endpoints()] == [str(rig.app.http_address)] * is_known
        [answer] = await answers(rig.app, [headers(end=True)])
        assert answer.HasField("immediate_response") is not is_known
    assert not rig.app._endpoints(), "it drains"


def test_a_router_with_a_queue_comes_later_and_a_new_one_takes_conversations_from_all_alike() -> None:
    routers = [RouterEndpoint(f"10.0.0.{number}:8000", 0) for number in range(4)]
    before = {key: in_order(routers, key) for key in map(str, range(400))}
    assert all(sorted(order) == [one.address for one in routers] for order in before.values())
    shares = [sum(order[0] == one.address for order in before.values()) for one in routers]
    assert min(shares) > 60
    busy = [routers[0]._replace(num_queued=1), *routers[1:]]
    assert all(in_order(busy, key)[-1] == routers[0].address for key in before)
    grown = [*routers, RouterEndpoint("10.0.0.9:8000", 0)]
    moved = [key for key in before if in_order(grown, key)[0] != before[key][0]]
    assert 0 < len(moved) < 140
    assert {in_order(grown, key)[0] for key in moved} == {"10.0.0.9:8000"}


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ({"prompt_cache_key": "a", "prompt": "x"}, {"prompt_cache_key": "a", "prompt": "y"}, True),
        ({"prompt": "once"}, {"prompt": "twice"}, False),
        ({"messages": [SYSTEM, {"role": "user", "content": "b"}]}, {"messages": [SYSTEM, USER]}, False),
        ({"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER, {"role": "assistant", "content": "c"}, USER]}, True),
        ({"messages": [USER]}, {"messages": [USER, {"role": "assistant", "content": "c"}, USER]}, True),
        ({"messages": [LONG, USER]}, {"messages": [LONG, OTHER]}, False),
        ({"messages": [LONG, USER]}, {"messages": [LONG, USER, {"role": "assistant", "content": "c"}, OTHER]}, True),
        ({"input": [LONG, USER]}, {"input": [LONG, OTHER]}, False),
        ({"input": "a"}, {"input": "a", "stream": True}, True),
    ],
)
def test_turns_of_one_conversation_have_one_key(first: Any, second: Any, is_one: bool) -> None:
    keys = [conversation(json.dumps(one).encode()) for one in (first, second)]
    assert None not in keys
    assert (keys[0] == keys[1]) is is_one


@pytest.mark.parametrize("num_bytes", [1000, LARGE_BYTES])
async def test_the_loop_does_not_read_a_long_body(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    threads = list[threading.Thread]()

    def recorded(data: bytes) -> str | None:
        threads.append(threading.current_thread())
        return conversation(data)

    async def requests() -> AsyncIterator[ext_proc.ProcessingRequest]:
        for part in [headers(), *body(json.dumps({"prompt": "x" * num_bytes}).encode())]:
            yield part

    monkeypatch.setattr(endpoint_picker, "conversation", recorded)
    picker = endpoint_picker.EndpointPicker(lambda: [RouterEndpoint("10.0.0.1:8000", 0)])
    assert len([one async for one in picker.Process(requests(), cast(Any, None))]) == 2
    [thread] = threads
    assert (thread is threading.main_thread()) is (num_bytes < LARGE_BYTES)


def test_the_key_of_token_ids_is_their_beginning() -> None:
    ids = list(range(10_000))
    keys = {conversation(json.dumps({"prompt": ids[:number]}).encode()) for number in (5_000, 10_000)}
    assert keys == {json.dumps(ids)[:4096]}


DEEP = pytest.param(b"[" * 10**5, id="deep")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"{}", b'{"messages": []}', b"\xff", DEEP])
def test_what_is_no_conversation_has_no_key(data: bytes) -> None:
    assert conversation(data) is None


def test_a_key_can_be_encoded_whatever_the_client_has_written() -> None:
    key = conversation(b'{"prompt_cache_key": "\\ud800"}')
    assert key is not None
    assert key.encode()


def test_a_picker_without_routers_or_an_http_port_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"endpoint_picker\.listen needs http\.listen"):
        RouterSettings(router=RouterSection(model="m"), endpoint_picker=EndpointPickerSettings(listen="127.0.0.1:0"))
