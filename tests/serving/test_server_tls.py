"""A server with TLS: whom it lets in, how it follows its files, and what stays open."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from grpc_health.v1 import health_pb2, health_pb2_grpc

import serving.server
from protos.tandem.v1 import generation_pb2 as pb
from protos.tandem.v1.generation_pb2_grpc import GenerationServiceStub
from serving.auth import certificate_authorizer
from serving.channel import ReloadingChannel, channel_options, open_channel
from serving.errors import Unauthenticated
from serving.server import HealthSettings, Server, ServerSettings, ServerTls
from serving.tls import TlsMaterial
from tandem.local_stack.pki import StackCa
from tests.certificates import Files, files_of, long_ago
from tests.channels import PATIENT
from tests.grpc_calls import next_message
from tests.serving.conftest import SERVICE, Scripted
from tests.waiting import until

TIMEOUT_S = 20.0


class Secured:
    """Servers with TLS and channels to them, ended with the test."""

    def __init__(self, folder: Path, authority: StackCa, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.servicer = Scripted()
        self.server_files = files_of(folder, "server", authority)
        self.client_files = files_of(folder, "client", authority)

    async def start(self, *, require_client_cert: bool = True, **arguments: object) -> Server:
        tls = ServerTls(self.server_files.tls(), require_client_cert)
        server = Server(ServerSettings(drain_accept_s=0.0), tls=tls, **arguments)  # type: ignore[arg-type]
        await server.register(SERVICE, self.servicer)
        await server.start()
        self.stack.push_async_callback(server.stop)
        return server

    async def channel(self, server: Server, files: Files | None, **arguments: object) -> grpc.aio.Channel:
        tls = None if files is None else files.tls()
        channel = open_channel(server.address, PATIENT, tls=tls, **arguments)  # type: ignore[arg-type]
        return await self.stack.enter_async_context(channel)


def material_of(channel: ReloadingChannel) -> TlsMaterial:
    material = channel.connection().material
    assert material is not None
    return material


@pytest.fixture
async def secured(tmp_path: Path, authority: StackCa) -> AsyncIterator[Secured]:
    async with AsyncExitStack() as stack:
        yield Secured(tmp_path, authority, stack)


async def ask(channel: grpc.aio.Channel) -> list[str]:
    call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="hello"), timeout=TIMEOUT_S)
    return [response.model async for response in call]


async def refusal(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(channel)
    return caught.value


async def check_health(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
    return answer.status


async def test_both_ends_show_certificates(secured: Secured) -> None:
    server = await secured.start()
    assert await ask(await secured.channel(server, secured.client_files))


async def test_a_client_without_or_with_a_wrong_certificate_gets_no_connection(
    secured: Secured, tmp_path: Path, authority: StackCa
) -> None:
    server = await secured.start()
    stranger = files_of(tmp_path, "stranger", StackCa("another"), authority)
    expired = files_of(tmp_path, "expired", authority, **long_ago())
    for files in (stranger, expired, None):
        error = await refusal(await secured.channel(server, files))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert secured.servicer.limits_s == []


async def test_a_server_of_another_ca_or_name_or_age_is_not_talked_to(
    secured: Secured, tmp_path: Path, authority: StackCa
) -> None:
    server = await secured.start()
    doubtful = files_of(tmp_path, "doubtful", authority, StackCa("another"))
    assert "CERTIFICATE_VERIFY_FAILED" in str((await refusal(await secured.channel(server, doubtful))).details())
    channel = await secured.channel(server, secured.client_files, peer_name="other.name")
    assert "Hostname Verification" in str((await refusal(channel)).details())
    assert await ask(await secured.channel(server, secured.client_files, peer_name="server"))
    secured.server_files.replace(authority.issue("server", ("127.0.0.1",), **long_ago()))
    assert "expired" in str((await refusal(await secured.channel(server, secured.client_files))).details())
    assert len(secured.servicer.limits_s) == 1


async def test_a_new_ca_with_an_overlap_is_taken_without_a_failed_call_and_streams_go_on(
    secured: Secured, authority: StackCa
) -> None:
    server = await secured.start()
    channel = await secured.channel(server, secured.client_files)
    assert isinstance(channel, ReloadingChannel)
    stub = GenerationServiceStub(channel)
    stream = stub.Generate(pb.GenerateRequest(text="wait"), timeout=TIMEOUT_S)
    assert (await next_message(stream)).model == "started"
    reading = asyncio.ensure_future(next_message(stream))
    first = channel.connection()
    successor = StackCa()  # of the same name

    # STEP: all trust both CAs, then have certificates of the new one, then trust only the new one
    for files, name in ((secured.server_files, "server"), (secured.client_files, "client")):
        files.replace(authority.issue(name, ("127.0.0.1",)), authority, successor)
    assert await ask(channel)
    for files, name in ((secured.server_files, "server"), (secured.client_files, "client")):
        files.replace(successor.issue(name, ("127.0.0.1",)), authority, successor)
        assert await ask(channel)
    await until(lambda: material_of(channel).chain == secured.client_files.certificate.read_bytes())
    for files, name in ((secured.server_files, "server"), (secured.client_files, "client")):
        files.replace(successor.issue(name, ("127.0.0.1",)), successor)
        assert await ask(channel)

    # STEP: new connections must be of the new CA; the open stream continues
    await until(lambda: material_of(channel).ca == successor.certificate)
    late = await secured.channel(server, secured.client_files)
    assert await ask(late)
    assert first.num_calls == 1
    assert not stream.done()
    secured.servicer.go.set()
    assert (await reading).model == "went on"
    assert await stream.read() is grpc.aio.EOF
    await until(lambda: first.num_calls == 0)
    assert channel.connection() is not first


async def test_two_cas_of_one_name_are_distinguished(secured: Secured, authority: StackCa) -> None:
    server = await secured.start()
    successor = StackCa()
    for believed in ((authority, successor), (successor, authority)):
        for issuer in believed:
            secured.server_files.replace(issuer.issue("server", ("127.0.0.1",)), *believed)
            secured.client_files.replace(issuer.issue("client"), *believed)
            assert await ask(await secured.channel(server, secured.client_files))


async def test_files_that_the_peer_does_not_accept_break_nothing_that_stands(
    secured: Secured, authority: StackCa
) -> None:
    server = await secured.start()
    channel = await secured.channel(server, secured.client_files)
    assert await ask(channel)
    secured.client_files.replace(StackCa("stranger").issue("client"))
    for _ in range(5):
        assert await ask(channel)
        await asyncio.sleep(0.05)
    secured.client_files.replace(authority.issue("client"))
    assert isinstance(channel, ReloadingChannel)
    await until(lambda: material_of(channel).chain == secured.client_files.certificate.read_bytes())
    assert await ask(channel)


async def test_files_that_the_peer_does_not_accept_break_no_idle_channel(secured: Secured, authority: StackCa) -> None:
    server = await secured.start()
    options = (*channel_options(PATIENT), ("grpc.client_idle_timeout_ms", 1000))
    channel = await secured.channel(server, secured.client_files, options=options)
    assert isinstance(channel, ReloadingChannel)
    assert await ask(channel)
    current = channel.connection()
    await until(lambda: current.channel.get_state() is grpc.ChannelConnectivity.IDLE)
    secured.client_files.replace(StackCa("stranger").issue("client"))
    with suppress(grpc.aio.AioRpcError):  # the first call finds out
        await ask(channel)
    await until(lambda: channel.connection() is current)
    for _ in range(3):
        assert await ask(channel)
    secured.client_files.replace(authority.issue("client"))
    assert await ask(channel)
    await until(lambda: material_of(channel).chain == secured.client_files.certificate.read_bytes())


async def test_an_idle_channel_whose_certificate_has_expired_has_a_new_one(
    secured: Secured, authority: StackCa
) -> None:
    server = await secured.start()
    good = secured.client_files.certificate.read_bytes(), secured.client_files.key.read_bytes()
    secured.client_files.replace(authority.issue("client", **long_ago()))
    channel = await secured.channel(server, secured.client_files)  # not connected
    secured.client_files.certificate.write_bytes(good[0])
    secured.client_files.key.write_bytes(good[1])
    for _ in range(3):
        assert await ask(channel)


async def test_an_expired_certificate_is_logged_without_calls(
    secured: Secured, authority: StackCa, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving.server, "_CHECK_TLS_S", 0.01)
    await secured.start()
    secured.server_files.replace(authority.issue("server", **long_ago()))
    await until(lambda: "of server, expired: until" in caplog.text)


async def test_a_half_written_pair_never_answers(secured: Secured, authority: StackCa) -> None:
    server = await secured.start()
    secured.server_files.key.write_bytes(authority.issue("server").key)
    assert await ask(await secured.channel(server, secured.client_files))


async def test_certificates_need_an_allowed_name_and_health_stays_open(
    secured: Secured, tmp_path: Path, authority: StackCa
) -> None:
    server = await secured.start(authorizer=certificate_authorizer(("router", "instance")))
    error = await refusal(await secured.channel(server, secured.client_files))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "tls.client_names" in str(error.details())
    assert await check_health(await secured.channel(server, secured.client_files)) == 1
    assert await ask(await secured.channel(server, files_of(tmp_path, "router", authority)))


@pytest.mark.parametrize("allowed", ["2001:db8::1", "2001:DB8:0:0:0:0:0:1"])
async def test_an_ip_address_is_an_allowed_name_however_it_is_written(
    secured: Secured, authority: StackCa, allowed: str
) -> None:
    server = await secured.start(authorizer=certificate_authorizer((allowed,)))
    secured.client_files.replace(authority.issue("client", ("2001:db8::2",)))
    error = await refusal(await secured.channel(server, secured.client_files))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    secured.client_files.replace(authority.issue("client", ("2001:db8::1",)))
    assert await ask(await secured.channel(server, secured.client_files))


async def test_a_gate_is_passed_before_anything_is_counted_or_parsed(secured: Secured) -> None:
    def closed(context: object) -> None:
        raise Unauthenticated("not allowed")

    server = await secured.start(authorizer=closed)
    error = await refusal(await secured.channel(server, secured.client_files))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "not allowed" in str(error.details())
    assert secured.servicer.limits_s == []


async def test_the_port_for_probes_speaks_plaintext_health_and_nothing_else(secured: Secured) -> None:
    server = await secured.start(probes=HealthSettings(listen="127.0.0.1:0"))
    async with open_channel(f"127.0.0.1:{server.probe_port}", PATIENT) as channel:
        assert await check_health(channel) == 1
        assert await check_health(channel, SERVICE.full_name) == 1
        assert (await refusal(channel)).code() is grpc.StatusCode.UNIMPLEMENTED
        # As a call of one message: a stream's may come behind the end of the call.
        reflection = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflection(b"", timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        server.health.begin_draining()
        assert await check_health(channel, SERVICE.full_name) == 2
    await server.stop()


def test_many_threads_get_pairs_that_fit_while_files_change(secured: Secured, authority: StackCa) -> None:
    """As gRPC asks for them, at each handshake from a thread of its own. Without gRPC: its core may crash where a
    handshake meets a change (docs/critiques.md)."""
    files, done = secured.server_files.tls(), threading.Event()

    def rotate() -> None:
        while not done.is_set():
            secured.server_files.replace(authority.issue("server", ("127.0.0.1",)))

    def read() -> None:
        chains = set[bytes]()
        while len(chains) < 10:
            material = files.current()
            assert material.chain is not None
            assert material.key is not None
            certificate, key = load_pem_x509_certificate(material.chain), load_pem_private_key(material.key, None)
            assert certificate.public_key() == key.public_key()
            chains.add(material.chain)

    rotating = threading.Thread(target=rotate)
    rotating.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            for reading in [threads.submit(read) for _ in range(4)]:
                reading.result()
    finally:
        done.set()
        rotating.join()


def test_the_log_of_a_secured_server_has_no_key_in_it(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ServerTls(secured.server_files.tls(), require_client_cert=True).credentials()
    assert "PRIVATE KEY" not in caplog.text
    assert caplog.records
