"""Clients with credentials: what they present, how they follow their files, and their errors."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from cryptography import x509

from protos.tandem.v1 import common_pb2, generation_pb2
from serving.interceptor import Context
from serving.server import Server, ServerSettings, ServerTls
from tandem import AsyncClient, Client, TandemError
from tandem.client import channel
from tandem.client.credentials import Credentials
from tandem.commands.generate import command as generate_command
from tandem.commands.pools import command as pools_command
from tandem.local_stack.pki import StackCa
from tests.certificates import Files, files_of, long_ago
from tests.certificates import replace as replace_file
from tests.waiting import wait_until

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
HANG_S = 20.0


class Echo:
    """Answers two tokens, the second one when it may; remembers what the calls carried."""

    def __init__(self) -> None:
        self.tokens: list[str | None] = []
        self.peers: list[str] = []
        self.remaining_s: list[float] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def _note(self, context: Context) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self.tokens.append(metadata.get("authorization"))
        self.peers.append(context.peer())
        self.remaining_s.append(context.time_remaining() or math.inf)

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> Any:
        self._note(context)
        chunk = common_pb2.TokenChunk(stream_epoch=1, token_ids=[1], text="a")
        yield generation_pb2.GenerateResponse(tokens=chunk, prompt_tokens=1, model="echo")
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_LENGTH)
        chunk = common_pb2.TokenChunk(
            stream_epoch=1, token_index=1, token_ids=[2], text="b", text_offset=1, finish=finish
        )
        yield generation_pb2.GenerateResponse(tokens=chunk)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        self._note(context)
        return generation_pb2.AbortResponse(num_aborted=1)

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        self._note(context)
        return generation_pb2.GetModelInfoResponse(model="echo")


@dataclass
class Running:
    """A server on a thread of its own."""

    address: str
    echo: Echo


@contextmanager
def serving(files: Files | None, *, require_client_cert: bool = False, port: int = 0) -> Iterator[Running]:
    echo, started, stop = Echo(), threading.Event(), threading.Event()
    addresses: list[str] = []

    async def serve() -> None:
        tls = None if files is None else ServerTls(files.tls(), require_client_cert)
        server = Server(ServerSettings(port=port, drain_accept_s=0.0), tls=tls)
        await server.register(SERVICE, echo)
        await server.start()
        addresses.append(server.address)
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(HANG_S)
        yield Running(addresses[0], echo)
    finally:
        echo.may_end.set()
        stop.set()
        thread.join(HANG_S)


@pytest.fixture
def server_files(tmp_path: Path, authority: StackCa) -> Files:
    return files_of(tmp_path, "router", authority)


@pytest.fixture
def client_files(tmp_path: Path, authority: StackCa) -> Files:
    return files_of(tmp_path, "client", authority)


def test_a_client_shows_its_certificate_and_its_token(server_files: Files, client_files: Files) -> None:
    with serving(server_files, require_client_cert=True) as running:
        with Client(running.address, credentials=client_files.credentials(token="t0ken")) as client:
            assert client.generate([1]).token_ids == (1, 2)
            assert client.model_info().model == "echo"
            assert client.abort("r") == 1

        async def ask() -> None:
            async with AsyncClient(running.address, credentials=client_files.credentials(token="t0ken")) as client:
                assert (await client.generate([1])).token_ids == (1, 2)
                assert (await client.model_info()).model == "echo"
                assert await client.abort("r") == 1

        asyncio.run(ask())
        assert running.echo.tokens == ["Bearer t0ken"] * 6


def test_the_token_is_read_from_its_file_for_each_request(server_files: Files, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    with serving(server_files) as running:
        credentials = Credentials(ca_file=server_files.ca, token_file=token_file)
        with Client(running.address, credentials=credentials) as client:
            with pytest.raises(ValueError, match=r"token_file: .* cannot be read"):
                client.model_info()
            for token in ("first", "second"):
                token_file.write_text(f"{token}\n")
                client.model_info()
        assert running.echo.tokens == ["Bearer first", "Bearer second"]


def test_new_files_apply_to_the_next_call_and_a_stream_continues(server_files: Files, client_files: Files) -> None:
    successor = StackCa("successor")
    with (
        serving(server_files, require_client_cert=True) as running,
        Client(running.address, credentials=client_files.credentials()) as client,
    ):
        running.echo.may_end.clear()
        stream = client.stream([1])
        assert next(stream).text == "a"
        for files, name in ((server_files, "router"), (client_files, "client")):
            files.replace(successor.issue(name, ("127.0.0.1",)), successor)
        assert client.model_info().model == "echo"
        running.echo.may_end.set()
        assert "".join(piece.text for piece in stream) == "b"
        assert client.model_info().model == "echo"
        before, after, later = running.echo.peers
        assert before != after == later, "the next call after the change has to have a connection of its own"


def test_close_cancels_a_stream_that_began_with_the_certificate_before(
    server_files: Files, client_files: Files, authority: StackCa
) -> None:
    with (
        serving(server_files, require_client_cert=True) as running,
        Client(running.address, credentials=client_files.credentials()) as client,
    ):
        running.echo.may_end.clear()
        stream = client.stream([1], timeout_s=HANG_S)
        assert next(stream).text == "a"
        client_files.replace(authority.issue("client", ("127.0.0.1",)))
        client.model_info()
        before, after = running.echo.peers
        assert before != after, "the call after the change has to have a connection of its own"
        client.close()
        with pytest.raises(TandemError) as raised:
            next(stream)
        assert raised.value.status == "CANCELLED"


def test_a_certificate_that_the_router_rejects_breaks_no_working_connection(
    server_files: Files, client_files: Files, authority: StackCa
) -> None:
    """Until it has a good one, which the next call uses."""
    with (
        serving(server_files, require_client_cert=True) as running,
        Client(running.address, credentials=client_files.credentials()) as client,
    ):
        client.model_info()
        client_files.replace(StackCa("another").issue("client", ("127.0.0.1",)))
        for _ in range(3):
            assert client.model_info().model == "echo"
        assert client.generate([1]).token_ids == (1, 2)
        client_files.replace(authority.issue("client", ("127.0.0.1",)))
        client.model_info()
        *before, after = running.echo.peers
        assert before == [before[0]] * 5
        assert after != before[0]


def test_a_certificate_that_the_router_rejects_breaks_no_idle_client(
    server_files: Files, client_files: Files, authority: StackCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_OPTIONS", (*channel._OPTIONS, ("grpc.client_idle_timeout_ms", 1000)))
    with (
        serving(server_files, require_client_cert=True) as running,
        Client(running.address, credentials=client_files.credentials()) as client,
    ):
        client.model_info()
        current = client._channel._current.channel
        wait_until(lambda: channel._state(current) is grpc.ChannelConnectivity.IDLE)
        client_files.replace(StackCa("another").issue("client", ("127.0.0.1",)))
        for _ in range(3):
            assert client.model_info().model == "echo"
        client_files.replace(authority.issue("client", ("127.0.0.1",)))
        client.model_info()
        assert client._channel._current.channel is not current, "the good certificate has no connection"


def test_a_certificate_that_the_router_rejects_breaks_no_client_of_one_that_restarts(
    server_files: Files, client_files: Files
) -> None:
    with serving(server_files, require_client_cert=True) as running:
        client = Client(running.address, credentials=client_files.credentials(), retries=0)
        client.model_info()
        client_files.replace(StackCa("another").issue("client", ("127.0.0.1",)))
        client.model_info()
    with client:
        current = client._channel._current.channel

        def is_answered() -> bool:
            with suppress(TandemError):
                return client.model_info().model == "echo"
            return False

        wait_until(lambda: not is_answered() and channel._state(current) is grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        assert not is_answered()
        with serving(server_files, require_client_cert=True, port=int(running.address.rpartition(":")[2])):
            wait_until(is_answered)


def test_a_call_has_what_a_new_connection_leaves_of_its_time(
    server_files: Files, client_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SimpleNamespace(is_settled=SimpleNamespace(wait=lambda timeout_s: time.sleep(1.0)))
    with (
        serving(server_files) as running,
        Client(running.address, credentials=client_files.credentials(), timeout_s=HANG_S) as client,
    ):
        monkeypatch.setattr(client._channel, "_follow", lambda: slow)
        client.model_info()
        assert running.echo.remaining_s[0] < HANG_S - 0.5


def test_routers_on_one_host_are_verified_by_it(server_files: Files) -> None:
    credentials = Credentials(ca_file=server_files.ca)

    async def ask() -> str:
        async with AsyncClient(addresses, credentials=credentials) as client:
            return (await client.generate([1])).model

    with serving(server_files) as first, serving(server_files) as second:
        addresses = [first.address, second.address]
        with Client(addresses, credentials=credentials) as client:
            assert client.generate([1]).model == "echo"
        assert asyncio.run(ask()) == "echo"
        elsewhere = replace(credentials, server_name="another.host")
        assert_refused(",".join(addresses), elsewhere, "Hostname mismatch")


def test_routers_on_several_hosts_need_the_name_that_their_certificates_share(server_files: Files) -> None:
    credentials = Credentials(ca_file=server_files.ca)
    with serving(server_files) as running:
        addresses = [running.address, "127.0.0.2:1"]
        problem = r"server_name: is missing; TLS to several hosts \(127\.0\.0\.1, 127\.0\.0\.2\).*--server-name"
        for kind in (Client, AsyncClient):
            with pytest.raises(ValueError, match=problem):
                kind(addresses, credentials=credentials)
        with Client(addresses, credentials=replace(credentials, server_name="localhost")) as client:
            assert client.generate([1]).model == "echo"
        options = ["hello", "--address", ",".join(addresses), "--ca-file", str(server_files.ca)]
        result = CliRunner().invoke(generate_command, options)
        assert (result.exit_code, result.output.startswith("Error: server_name: is missing")) == (1, True)


@pytest.fixture
def problems(tmp_path: Path, server_files: Files, client_files: Files, authority: StackCa) -> dict[str, Any]:
    stranger = files_of(tmp_path, "stranger", StackCa("another"), authority)
    doubtful = files_of(tmp_path, "doubtful", authority, StackCa("another"))
    expired = files_of(tmp_path, "expired", authority, **long_ago())
    early = files_of(tmp_path, "early", authority, not_before=datetime.now(UTC) + timedelta(hours=1))
    good = client_files.credentials()
    return {
        r"speaks TLS: give the CA to trust as ca_file \(--ca-file\)": Credentials(),
        r"requires a client certificate: give cert_file and key_file": Credentials(ca_file=client_files.ca),
        r"does not trust the client certificate in .*stranger\.crt": stranger.credentials(),
        r"the client certificate in .*expired\.crt expired at 20": expired.credentials(),
        r"the client certificate in .*early\.crt is not valid before 20": early.credentials(),
        r"is not trusted: unable to get local issuer certificate; trusted are the CAs in": doubtful.credentials(),
        r"is not trusted: .*[Hh]ostname mismatch": replace(good, server_name="another.host"),
    }


def test_each_tls_problem_has_its_own_message(server_files: Files, problems: dict[str, Credentials]) -> None:
    async def ask(text: str, credentials: Credentials) -> None:
        async with AsyncClient(running.address, credentials=credentials) as client:
            with pytest.raises(TandemError, match=text):
                await client.generate([1])

    with serving(server_files, require_client_cert=True) as running:
        for text, credentials in problems.items():
            assert_refused(running.address, credentials, text)
            asyncio.run(ask(text, credentials))
        assert running.echo.tokens == []


def test_the_cause_is_found_where_pythons_ssl_is_stricter_than_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is from 3.13 on. gRPC accepts a CA without a key usage."""
    add_extension, new_context = x509.CertificateBuilder.add_extension, ssl.create_default_context

    def add_no_key_usage(builder: x509.CertificateBuilder, extension: x509.ExtensionType, critical: bool) -> Any:
        return builder if isinstance(extension, x509.KeyUsage) else add_extension(builder, extension, critical)

    def new_strict_context(**options: Any) -> ssl.SSLContext:
        context = new_context(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(x509.CertificateBuilder, "add_extension", add_no_key_usage)
    monkeypatch.setattr(ssl, "create_default_context", new_strict_context)
    files = files_of(tmp_path, "router", StackCa())
    with serving(files, require_client_cert=True) as running:
        assert_refused(running.address, Credentials(ca_file=files.ca), "requires a client certificate")


def assert_refused(address: str, credentials: Credentials, problem: str) -> None:
    with Client(address, credentials=credentials) as client, pytest.raises(TandemError, match=problem):
        client.model_info()


def test_an_expired_server_is_reported(server_files: Files, client_files: Files, authority: StackCa) -> None:
    server_files.replace(authority.issue("router", ("127.0.0.1",), **long_ago()))
    with serving(server_files) as running:
        assert_refused(running.address, client_files.credentials(), "is not trusted: certificate has expired")


def test_a_client_with_tls_at_a_plaintext_port_is_reported(client_files: Files) -> None:
    with serving(None) as running:
        problem = r"speaks plaintext, not TLS: omit ca_file \(--ca-file\)"
        assert_refused(running.address, client_files.credentials(), problem)


@contextmanager
def rejecting_by_alert(files: Files, version: ssl.TLSVersion) -> Iterator[str]:
    """The address of a server that requires a client certificate and, unlike gRPC's, says so before it closes."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    tls.load_cert_chain(files.certificate, files.key)
    tls.set_alpn_protocols(["h2"])
    tls.verify_mode, tls.maximum_version = ssl.CERT_REQUIRED, version

    def serve() -> None:
        with suppress(OSError):  # once the listener is shut down
            while True:
                connection, _ = listener.accept()
                with connection.dup() as unread:  # a close with unread bytes would reset the connection
                    with suppress(OSError), tls.wrap_socket(connection, server_side=True) as wrapped:
                        wrapped.recv(1)
                    while unread.recv(4096):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_that_rejects_by_an_alert_is_known_to_speak_tls(
    server_files: Files, problems: dict[str, Credentials], version: ssl.TLSVersion
) -> None:
    with rejecting_by_alert(server_files, version) as address:
        for text in ("requires a client", "does not trust"):
            [(problem, credentials)] = [(one, given) for one, given in problems.items() if one.startswith(text)]
            assert_refused(address, credentials, problem)


def test_a_closed_port_is_not_a_tls_problem(client_files: Files) -> None:
    assert_refused("127.0.0.1:1", client_files.credentials(), r"no router answers at 127\.0\.0\.1:1")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"cert_file": Path("a")}, "cert_file and key_file go together"),
        ({"cert_file": Path("a"), "key_file": Path("b")}, "requires ca_file"),
        ({"server_name": "router"}, "requires ca_file"),
        ({"token": "a", "token_file": Path("b")}, "not both"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Credentials(**fields)


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "café"])
def test_a_token_that_no_header_can_carry_is_refused_unshown(token: str) -> None:
    with pytest.raises(ValueError, match="is empty or not printable ASCII") as caught:
        Credentials(token=token).metadata()
    assert not token or token not in str(caught.value)
    assert "s3cret" not in repr(Credentials(token="s3cret"))


def test_commands_take_credentials_from_options_and_environment(
    server_files: Files, client_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    replace_file(token_file, b"t0ken")
    with serving(server_files, require_client_cert=True) as running:
        ask = ["hello", "--address", running.address]
        result = CliRunner().invoke(generate_command, ask)
        assert result.exit_code == 1
        assert "speaks TLS: give the CA to trust as ca_file (--ca-file)" in result.output
        options = ["--ca-file", str(client_files.ca), "--cert-file", str(client_files.certificate)]
        result = CliRunner().invoke(generate_command, [*ask, *options])
        assert "cert_file and key_file go together" in result.output
        options += ["--key-file", str(client_files.key), "--token-file", str(token_file)]
        assert CliRunner().invoke(generate_command, [*ask, *options]).output.strip() == "ab"
        for name, path in (("CA", client_files.ca), ("CERT", client_files.certificate), ("KEY", client_files.key)):
            monkeypatch.setenv(f"TANDEM_CLIENT__{name}_FILE", str(path))
        assert CliRunner().invoke(generate_command, ask).output.strip() == "ab"
        assert running.echo.tokens == ["Bearer t0ken", None]
        # The server is not an admin listener: this error shows that the handshake succeeded.
        monkeypatch.setenv("TANDEM_CLIENT__TOKEN_FILE", str(token_file))
        for arguments in (["--admin", running.address], ["drain", "decode-0", "--admin", running.address]):
            result = CliRunner().invoke(pools_command, arguments)
            assert "is not an admin listener" in result.output
        token_file.unlink()
        for command, arguments in ((generate_command, ask), (pools_command, ["--admin", running.address])):
            result = CliRunner().invoke(command, arguments)
            assert "Error: token_file: " in result.output
