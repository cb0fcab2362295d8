"""Security of the router's ports: tokens that name tenants, and operators that are not clients."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from protos.tandem.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    pools_pb2,
    pools_pb2_grpc,
    signals_pb2,
    signals_pb2_grpc,
)
from router.api.security import AuthSettings, RouterTlsSettings, Security
from router.request.caller import Caller
from serving.channel import open_channel
from serving.errors import Unauthenticated
from serving.interceptor import Context
from serving.limits import CONTROL
from serving.server import HealthSettings, ServerSettings
from serving.settings import SettingsError
from tandem.local_stack.pki import StackCa
from tests.certificates import Files, files_of, replace
from tests.channels import PATIENT
from tests.router.conftest import Run
from tests.router.rig import PROMPT, TIMEOUT_S, Rig, request_of, slow
from tests.waiting import until

ALICE, BOB, OPERATOR = "alices-token", "bobs-token", "operators-token"


def write_tokens(path: Path, **tokens: Iterable[str]) -> Path:
    lines = [
        f"{tenant}: {hashlib.sha256(token.encode()).hexdigest()}\n" for tenant, own in tokens.items() for token in own
    ]
    replace(path, "".join(lines).encode())
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", alice=[ALICE], bob=[BOB])


async def ask(rig: Rig, token: str | None, **fields: Any) -> list[generation_pb2.GenerateResponse]:
    call = rig.stub.Generate(request_of(**fields), timeout=TIMEOUT_S, metadata=bearer(token) if token else None)
    return [response async for response in call]


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def drained(call: Any) -> None:
    async for _ in call:
        pass


def salts(rig: Rig) -> list[str]:
    """Of the requests that came to the decode instance, in order."""
    records = (record for fake in rig.decode for record in fake.records if record.what == "decode")
    return [record.detail.request.cache_salt for record in records]


async def test_calls_without_a_known_token_are_rejected_and_health_and_reflection_are_open(
    run: Run, tokens: Path
) -> None:
    async with run(auth={"tokens_file": tokens}) as rig:
        for token in (None, "unknown"):
            assert await code_of(ask(rig, token)) is grpc.StatusCode.UNAUTHENTICATED
            metadata = bearer(token) if token else None
            calls: list[tuple[Any, object]] = [
                (rig.stub.Abort, generation_pb2.AbortRequest(request_ids=["a"])),
                (rig.stub.GetModelInfo, generation_pb2.GetModelInfoRequest()),
            ]
            for method, request in calls:
                call = method(request, timeout=TIMEOUT_S, metadata=metadata)
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(rig, ALICE)
        health = health_pb2_grpc.HealthStub(rig.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)).status == 1
        call = rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=TIMEOUT_S, metadata=bearer(BOB))
        assert await code_of(call) is grpc.StatusCode.OK


async def test_a_token_that_is_removed_from_the_file_is_rejected_at_once(run: Run, tokens: Path) -> None:
    async with run(auth={"tokens_file": tokens}) as rig:
        assert await ask(rig, BOB)
        write_tokens(tokens, alice=[ALICE], carol=["new"])
        assert await code_of(ask(rig, BOB)) is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(rig, "new")


async def test_a_tenants_priority_orders_no_other_tenants_requests_at_the_instances(run: Run, tokens: Path) -> None:
    async with run(prefill=0, auth={"tokens_file": tokens}) as rig:
        assert await ask(rig, ALICE, priority=3)
        write_tokens(tokens, alice=[ALICE, BOB])
        assert await ask(rig, BOB, priority=3)  # now hers as well, and she is the only tenant
        assert [record.detail.request.priority for record in rig.decode[0].recorded("decode")] == [0, 3]


async def test_the_token_names_the_tenant_whatever_the_client_says(run: Run, tokens: Path) -> None:
    admission = {"tenant_key": "x-tenant", "tenants": {"alice": {"max_tokens": 10}}}
    async with run(auth={"tokens_file": tokens}, admission=admission) as rig:
        for token, claimed, code in (
            (ALICE, "bob", grpc.StatusCode.RESOURCE_EXHAUSTED),
            (BOB, "alice", grpc.StatusCode.OK),
            (BOB, "no tenant's name", grpc.StatusCode.OK),
        ):
            metadata = (*bearer(token), ("x-tenant", claimed))
            call = rig.stub.Generate(request_of(), timeout=TIMEOUT_S, metadata=metadata)
            assert await code_of(drained(call)) is code


async def test_tenants_have_salts_of_their_own_into_which_a_clients_own_goes(run: Run, tokens: Path) -> None:
    async with run(prefill=0, auth={"tokens_file": tokens}) as rig:
        for token, own in ((ALICE, ""), (BOB, ""), (ALICE, "own"), (ALICE, ""), (BOB, "own")):
            await ask(rig, token, cache_salt=own, prompt=PROMPT)
        alice, bob, alices_own, alice_again, bobs_own = salts(rig)
        assert alice == alice_again
        assert len({alice, bob, alices_own, bobs_own}) == 4
        await ask(rig, BOB, cache_salt=alice, prompt=PROMPT)
        assert salts(rig)[-1] != alice, "a salt that was seen somewhere opens nothing"


async def test_without_tokens_a_clients_salt_is_passed_on_as_it_is(run: Run) -> None:
    async with run(prefill=0) as rig:
        await ask(rig, None, cache_salt="mine")
        assert salts(rig) == ["mine"]


@given(st.lists(st.tuples(st.text("ab.:/-@", min_size=1), st.text()), unique=True, min_size=2, max_size=2))
def test_different_pairs_of_tenant_and_salt_stay_different(pairs: list[tuple[str, str]]) -> None:
    one, other = (Caller(tenant, is_authenticated=True).salt(own) for tenant, own in pairs)
    assert one != other


async def test_a_tenant_aborts_its_own_requests_alone(run: Run, tokens: Path) -> None:
    async with run(decode=1, auth={"tokens_file": tokens}) as rig:
        rig.decode[0].behaviour = slow()
        call = rig.stub.Generate(request_of(max_tokens=50, request_id="r"), timeout=TIMEOUT_S, metadata=bearer(ALICE))
        assert await call.read()
        request = generation_pb2.AbortRequest(request_ids=["r", "alice\0r"])
        assert (await rig.stub.Abort(request, timeout=TIMEOUT_S, metadata=bearer(BOB))).num_aborted == 0
        assert (await rig.stub.Abort(request, timeout=TIMEOUT_S, metadata=bearer(ALICE))).num_aborted == 1


async def test_operators_have_tokens_of_their_own(run: Run, tokens: Path, tmp_path: Path) -> None:
    auth = {"tokens_file": tokens, "admin_tokens_file": write_tokens(tmp_path / "admin", ops=[OPERATOR])}
    async with run(router={"admin_listen": "127.0.0.1:0"}, auth=auth) as rig:
        async with grpc.aio.insecure_channel(str(rig.app.admin_address)) as channel:
            stub = pools_pb2_grpc.PoolsServiceStub(channel)
            for token, code in (
                (ALICE, grpc.StatusCode.UNAUTHENTICATED),
                (OPERATOR, grpc.StatusCode.OK),
            ):
                call = stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S, metadata=bearer(token))
                assert await code_of(call) is code
        assert await code_of(ask(rig, OPERATOR)) is grpc.StatusCode.UNAUTHENTICATED


@asynccontextmanager
async def secured(run: Run, files: Files, **sections: Any) -> AsyncIterator[Rig]:
    """A router with TLS. Its fakes speak plaintext, so it finds no instance."""
    tls = files.section(**sections.pop("tls", {}))
    async with run(wait=False, router={"admin_listen": "127.0.0.1:0"}, tls=tls, **sections) as rig:
        yield rig


async def listed(rig: Rig, files: Files, *, with_certificate: bool, token: str = "none") -> grpc.StatusCode:
    tls = files.tls() if with_certificate else type(files.tls())(files.ca)
    async with open_channel(str(rig.app.admin_address), PATIENT, tls=tls) as channel:
        stub = pools_pb2_grpc.PoolsServiceStub(channel)
        call = stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S, metadata=bearer(token))
        return await code_of(call)


async def test_with_tls_operators_show_a_certificate_and_clients_need_none(run: Run, tmp_path: Path) -> None:
    authority = StackCa()
    files = files_of(tmp_path, "router", authority)
    async with secured(run, files, tls={"client_names": ("operator",)}) as rig:
        async with open_channel(rig.app.address, PATIENT, tls=type(files.tls())(files.ca)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)).status == 1
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert await code_of(stub.Abort(generation_pb2.AbortRequest(), timeout=TIMEOUT_S)) is grpc.StatusCode.OK
        assert await listed(rig, files, with_certificate=False) is grpc.StatusCode.UNAVAILABLE
        assert await listed(rig, files, with_certificate=True) is grpc.StatusCode.PERMISSION_DENIED
        operator = files_of(tmp_path, "operator", authority)
        assert await listed(rig, operator, with_certificate=True) is grpc.StatusCode.OK


async def test_with_tls_and_tokens_operators_need_the_token_alone(run: Run, tmp_path: Path) -> None:
    files = files_of(tmp_path, "router", StackCa())
    auth = {"admin_tokens_file": write_tokens(tmp_path / "admin", ops=[OPERATOR])}
    async with secured(run, files, auth=auth) as rig:
        assert await listed(rig, files, with_certificate=False, token=OPERATOR) is grpc.StatusCode.OK
        assert await listed(rig, files, with_certificate=True) is grpc.StatusCode.UNAUTHENTICATED


async def test_where_certificates_are_required_they_and_tokens_are_both_needed_at_each_port(
    run: Run, tmp_path: Path, tokens: Path
) -> None:
    authority = StackCa()
    files, named = files_of(tmp_path, "router", authority), files_of(tmp_path, "client", authority)
    auth = {"tokens_file": tokens, "admin_tokens_file": write_tokens(tmp_path / "admin", ops=[OPERATOR])}
    tls = {"require_client_cert": True, "client_names": ("client",)}
    async with secured(run, files, tls=tls, auth=auth) as rig:

        async def aborted(own: Files, token: str, *, with_certificate: bool = True) -> grpc.StatusCode:
            shown = own.tls() if with_certificate else type(own.tls())(own.ca)
            async with open_channel(rig.app.address, PATIENT, tls=shown) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                return await code_of(
                    stub.Abort(generation_pb2.AbortRequest(), timeout=TIMEOUT_S, metadata=bearer(token))
                )

        for call, token in ((aborted, ALICE), (partial(listed, rig), OPERATOR)):
            assert await call(named, token=token, with_certificate=False) is grpc.StatusCode.UNAVAILABLE
            assert await call(files, token=token, with_certificate=True) is grpc.StatusCode.PERMISSION_DENIED
            assert await call(named, token="unknown", with_certificate=True) is grpc.StatusCode.UNAUTHENTICATED
            assert await call(named, token=token, with_certificate=True) is grpc.StatusCode.OK


async def test_a_router_with_tls_rejects_instances_without(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(run, files_of(tmp_path, "router", StackCa())) as rig:
        await until(lambda: "decode is out: " in caplog.text)  # it has tried
        assert rig.app.pools.decode.num_ready() == 0
        assert not rig.decode[0].num_watches


async def test_an_open_admin_listener_needs_a_private_address(tmp_path: Path) -> None:
    security = Security(RouterTlsSettings(), AuthSettings())
    security.admin_server(ServerSettings(host="127.0.0.1"))
    for host in ("0.0.0.0", "::", "8.8.8.8"):
        with pytest.raises(SettingsError, match=r"router\.admin_listen: .* is not a private address"):
            security.admin_server(ServerSettings(host=host))
    auth = AuthSettings(admin_tokens_file=write_tokens(tmp_path / "admin", ops=[OPERATOR]))
    Security(RouterTlsSettings(), auth).admin_server(ServerSettings(host="0.0.0.0"))


async def test_tokens_in_plaintext_on_a_public_address_log_a_warning(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    security = Security(RouterTlsSettings(), AuthSettings(tokens_file=tokens, admin_tokens_file=tokens))
    listeners: list[Callable[[str], object]] = [
        lambda host: security.clients_server(ServerSettings(host=host), HealthSettings()),
        lambda host: security.admin_server(ServerSettings(host=host)),
        lambda host: security.http_authorizer(f"{host}:8000"),
    ]
    for listen in listeners:
        listen("127.0.0.1")
        assert not caplog.records
        listen("0.0.0.0")
        assert "tokens are sent in plaintext to 0.0.0.0" in caplog.text
        caplog.clear()
    assert Security(RouterTlsSettings(), AuthSettings()).http_authorizer("0.0.0.0:8000") is None
    assert not caplog.records


async def test_routers_show_each_other_certificates_where_they_tell_their_signals(tmp_path: Path) -> None:
    authority = StackCa("Private CA")
    files = files_of(tmp_path, "routers.example", authority)
    tls = RouterTlsSettings(**files.section(client_names=["routers.example"]))
    security = Security(tls, AuthSettings())
    server = security.signals_server(ServerSettings())
    await server.start()
    try:
        plain = open_channel(server.address, PATIENT)
        for channel, answer in (
            (security.dial_router(server.address, PATIENT, "routers.example"), grpc.StatusCode.OK),
            (security.dial_router(server.address, PATIENT, "others.example"), grpc.StatusCode.UNAVAILABLE),
            (plain, grpc.StatusCode.UNAVAILABLE),
            (open_channel(server.address, PATIENT, tls=type(files.tls())(files.ca)), grpc.StatusCode.UNAVAILABLE),
        ):
            async with channel:
                stub = health_pb2_grpc.HealthStub(channel)
                assert await code_of(stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)) == answer
    finally:
        await server.stop()
    with pytest.raises(SettingsError, match="not a private address"):
        Security(RouterTlsSettings(), AuthSettings()).signals_server(ServerSettings(host="0.0.0.0"))


async def test_without_tls_gateways_ask_on_private_addresses_alone_unless_that_is_lifted(tmp_path: Path) -> None:
    security = Security(RouterTlsSettings(), AuthSettings())
    security.picker_server(ServerSettings(host="127.0.0.1"))
    with pytest.raises(SettingsError, match=r"endpoint_picker\.listen: 0\.0\.0\.0 is not a private address"):
        security.picker_server(ServerSettings(host="0.0.0.0"))
    security.picker_server(ServerSettings(host="0.0.0.0", allow_plaintext=True))
    tls = RouterTlsSettings(**files_of(tmp_path, "router", StackCa()).section())
    Security(tls, AuthSettings()).picker_server(ServerSettings(host="0.0.0.0"))


def test_with_tls_the_live_page_needs_operators_tokens(tmp_path: Path) -> None:
    tls = RouterTlsSettings(**files_of(tmp_path, "router", StackCa()).section())
    with pytest.raises(SettingsError, match=r"http\.page: .* give auth\.admin_tokens_file"):
        Security(tls, AuthSettings()).page_authorizer("127.0.0.1:8000")
    auth = AuthSettings(admin_tokens_file=write_tokens(tmp_path / "admin", ops=[OPERATOR]))
    with pytest.raises(Unauthenticated):
        Security(tls, auth).page_authorizer("127.0.0.1:8000")(())


class Signals:
    """Answers a router that asks."""

    async def GetSignals(
        self, request: signals_pb2.GetSignalsRequest, context: Context
    ) -> signals_pb2.GetSignalsResponse:
        return signals_pb2.GetSignalsResponse()


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1"]])
async def test_workers_hear_of_each_other_whatever_their_certificate_names(tmp_path: Path, hosts: list[str]) -> None:
    authority, files = StackCa(), files_of(tmp_path, "router.example", StackCa())
    files.replace(authority.issue("router.example", hosts), authority)
    tls = RouterTlsSettings(**files.section(client_names=["clients.example"]))
    security = Security(tls, AuthSettings(), is_worker=True)
    server = security.signals_server(ServerSettings())
    service = signals_pb2.DESCRIPTOR.services_by_name["SignalsService"]
    await server.register(service, Signals(), {"GetSignals": CONTROL})
    await server.start()
    try:
        async with security.dial_router(server.address, PATIENT, None) as channel:
            stub = signals_pb2_grpc.SignalsServiceStub(channel)
            assert (
                await code_of(stub.GetSignals(signals_pb2.GetSignalsRequest(), timeout=TIMEOUT_S)) == grpc.StatusCode.OK
            )
    finally:
        await server.stop()
    with pytest.raises(SettingsError, match="not a private address"):
        security.signals_server(ServerSettings(host="0.0.0.0"))
