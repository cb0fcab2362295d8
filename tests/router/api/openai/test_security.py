"""Authorization at the HTTP port: tokens as at the gRPC port, and certificates, which are reloaded while it runs."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from router.api.openai.server import HttpServer, HttpSettings, HttpTls
from serving.settings import SettingsError
from serving.tls import TlsFiles
from tandem.local_stack.pki import Issued, StackCa
from tests.certificates import HOSTS, Files, files_of, replace
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.test_security import ALICE, BOB, salts, write_tokens
from tests.router.rig import SHORT, TIMEOUT_S


async def test_only_known_tokens_may_ask(run_http: RunHttp, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens", alice=[ALICE], bob=[BOB])
    async with run_http(auth={"tokens_file": tokens}) as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/fake", "/metrics"):
            method = "POST" if "completions" in path else "GET"
            for headers in ({}, {"authorization": "Bearer unknown"}, {"authorization": f"Basic {ALICE}"}):
                response = await http.http.request(method, path, headers=headers)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
        assert (await http.http.get("/health")).status_code in (200, 503)
        with pytest.raises(openai.AuthenticationError):
            await http.openai.completions.create(model="fake", prompt=SHORT)
        assert not http.rig.decode[0].recorded("decode")
        known = http.openai.with_options(api_key=ALICE)
        assert (await known.completions.create(model="fake", prompt=SHORT, max_tokens=2)).choices


async def test_every_path_takes_a_token_as_x_api_key(run_http: RunHttp, tmp_path: Path) -> None:
    async with run_http(auth={"tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE])}) as http:
        for path in ("/v1/models", "/v1/models/fake", "/metrics", "/version", "/"):
            assert (await http.http.get(path, headers={"x-api-key": ALICE})).status_code == 200, path
            both = {"x-api-key": ALICE, "authorization": "Bearer unknown"}
            for headers in ({"x-api-key": "unknown"}, both):
                assert (await http.http.get(path, headers=headers)).status_code == 401, path
        answer = await http.http.post(
            "/v1/completions", json={"prompt": SHORT, "max_tokens": 2}, headers={"x-api-key": ALICE}
        )
        assert answer.status_code == 200


async def test_unknown_paths_of_the_messages_api_have_anthropics_errors(run_http: RunHttp, tmp_path: Path) -> None:
    async with run_http(auth={"tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE])}) as http:
        asked = (
            ("POST", "/v1/messages/batches", 404, "not_found_error"),
            ("GET", "/v1/messages/batches/a/results", 404, "not_found_error"),
            ("GET", "/v1/messages", 405, "invalid_request_error"),
            ("GET", "/v1/messages/count_tokens/", 405, "invalid_request_error"),
        )
        for method, path, status, kind in asked:
            for token, wanted in ((ALICE, (status, kind)), ("unknown", (401, "authentication_error"))):
                answer = await http.http.request(method, path, headers={"x-api-key": token})
                assert (answer.status_code, answer.json()["error"]["type"]) == wanted, path
                assert answer.json()["type"] == "error"
                assert answer.headers["request-id"] == answer.json()["request_id"]
        openais = await http.http.get("/v1/messagesx", headers={"x-api-key": ALICE})
        assert set(openais.json()) == {"error"}


async def test_two_tenants_share_no_prefix_cache(run_http: RunHttp, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens", alice=[ALICE], bob=[BOB])
    async with run_http(prefill=0, auth={"tokens_file": tokens}) as http:
        for token in (ALICE, BOB, ALICE):
            client = http.openai.with_options(api_key=token)
            await client.completions.create(
                model="fake", prompt=SHORT, max_tokens=2, extra_body={"cache_salt": "the same"}
            )
        alices, bobs, again = salts(http.rig)
        assert alices == again != bobs


def issued(folder: Path, name: str, authority: StackCa) -> Files:
    folder.mkdir()
    return files_of(folder, name, authority)


@asynccontextmanager
async def serving(tls: HttpTls | None, **limits: Any) -> AsyncIterator[str]:
    """A port that says hello."""

    async def hello(request: object) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/", hello)])
    server = HttpServer(app, HttpSettings(**{"listen": "127.0.0.1:0", **limits}), write_timeout_s=5.0, tls=tls)
    await server.start()
    try:
        yield f"https://{server.address}/"
    finally:
        await server.stop()


async def hello(url: str, believed: Files, own: Files | None = None) -> str:
    context = ssl.create_default_context(cafile=str(believed.ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's default from 3.13 on
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    async with httpx.AsyncClient(verify=context, timeout=TIMEOUT_S) as client:
        return (await client.get(url)).text


async def test_all_addresses_of_ipv6_include_those_of_ipv4() -> None:
    async with serving(None, listen="[::]:0") as url, httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for host in ("127.0.0.1", "[::1]"):
            assert (await client.get(url.replace("https", "http").replace("[::]", host))).text == "hello"


async def test_it_speaks_tls_with_the_routers_certificate(tmp_path: Path) -> None:
    files = issued(tmp_path / "router", "router", StackCa())
    stranger = issued(tmp_path / "stranger", "router", StackCa())
    async with serving(HttpTls(files.tls(), require_client_cert=False, client_names=("other",))) as url:
        assert await hello(url, files) == "hello"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await hello(url, stranger)
        with pytest.raises(httpx.TransportError):
            await hello(url.replace("https", "http"), files)


async def test_a_changed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    authority = StackCa()
    files = issued(tmp_path / "router", "router", authority)
    async with serving(HttpTls(files.tls(), require_client_cert=False, client_names=())) as url:
        context = ssl.create_default_context(cafile=str(files.ca))
        async with httpx.AsyncClient(verify=context, timeout=TIMEOUT_S) as standing:
            assert (await standing.get(url)).text == "hello"
            before = await serial(url, files)
            files.replace(authority.issue("router", HOSTS))
            assert await serial(url, files) != before
            assert (await standing.get(url)).text == "hello", "a connection that stands goes on"


async def serial(url: str, believed: Files) -> int:
    """Of the certificate that a new connection is shown."""
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(believed.ca))) as client:
        response = await client.get(url)
        shown = response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number


def _ask(url: str, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bool, bool, ssl.SSLSession | None]:
    """Whether a new connection is answered, whether it resumed `session`, and the session to resume next."""
    host, port = url.removeprefix("https://").removesuffix("/").split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=host, session=session) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                is_answered = connection.recv(4096).startswith(b"HTTP/1.1 200")
                return is_answered, bool(connection.session_reused), connection.session
        except ssl.SSLCertVerificationError:
            raise  # the client rejects the server
        except (ssl.SSLError, ConnectionError):
            return False, False, None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_is_resumed_of_a_ca_that_is_trusted_no_more(tmp_path: Path, version: ssl.TLSVersion) -> None:
    old, new = StackCa("old"), StackCa("new")
    files, client = issued(tmp_path / "router", "router", old), issued(tmp_path / "client", "client", old)
    successor = files_of(tmp_path / "client", "successor", new, old)
    context = ssl.create_default_context(cafile=str(client.ca))
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(client.certificate, client.key)
    async with serving(HttpTls(files.tls(), require_client_cert=True, client_names=())) as url:
        session = (await asyncio.to_thread(_ask, url, context, None))[2]
        is_answered, is_resumed, session = await asyncio.to_thread(_ask, url, context, session)
        assert is_answered
        assert is_resumed, "sessions of the present CA are resumed"
        replace(files.ca, new.certificate)
        for session_or_none in (session, None):
            assert not (await asyncio.to_thread(_ask, url, context, session_or_none))[0]
        assert await hello(url, client, successor) == "hello"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_comments_of_a_ca_file_may_have_any_letters(tmp_path: Path, encoding: str) -> None:
    authority = StackCa()
    files = issued(tmp_path / "router", "router", authority)
    friend = issued(tmp_path / "friend", "friend", authority)
    watched = files.tls()
    async with serving(HttpTls(watched, require_client_cert=True, client_names=())) as url:
        replace(files.ca, "# gültig bis 2036 für alle\n".encode(encoding) + authority.certificate)
        assert await hello(url, friend, friend) == "hello"
        assert (watched.num_reloads, watched.num_rejected) == (1, 0)
    async with serving(HttpTls(files.tls(), require_client_cert=True, client_names=())) as url:
        assert await hello(url, friend, friend) == "hello"


def _weak() -> Issued:
    """A certificate of its own, with a key that is too small for OpenSSL."""
    key, name, now = rsa.generate_private_key(65537, 1024), x509.Name([]), datetime.now(UTC)
    serial, end = x509.random_serial_number(), now + timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), serial, now - timedelta(days=1), end)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(pem)
    return Issued(certificate, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


@asynccontextmanager
async def reloading(tmp_path: Path) -> AsyncIterator[tuple[str, StackCa, Files, TlsFiles]]:
    """A server that needs no client certificate: its address, its CA, its files, and what has read them."""
    authority = StackCa()
    files = issued(tmp_path / "router", "router", authority)
    watched = files.tls()
    async with serving(HttpTls(watched, require_client_cert=False, client_names=())) as url:
        yield url, authority, files, watched


async def test_files_that_openssl_rejects_leave_the_last_usable_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reloading(tmp_path) as (url, authority, files, watched):
        before = await serial(url, files)
        for num_rejected in (1, 2):
            files.replace(_weak())
            for _ in range(3):
                assert await serial(url, files) == before
            warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert len(warnings) == watched.num_rejected == num_rejected
            assert (
                "tls.cert_file, key_file: OpenSSL rejects the certificate or its key: EE_KEY_TOO_SMALL" in warnings[-1]
            )
        with pytest.raises(SettingsError, match=r"^tls\.cert_file, key_file: OpenSSL rejects .*TOO_SMALL"):
            HttpTls(files.tls(), require_client_cert=False, client_names=())
        files.replace(authority.issue("router", HOSTS))
        assert await serial(url, files) != before


async def test_files_that_could_not_be_loaded_for_a_moment_are_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with reloading(tmp_path) as (url, authority, files, watched):
        before = await serial(url, files)
        with monkeypatch.context() as full_disk:
            full_disk.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
            files.replace(authority.issue("router", HOSTS))
            assert await serial(url, files) == before
        assert watched.num_rejected == 1
        assert "No such file or directory" in caplog.text
        async with asyncio.timeout(TIMEOUT_S):
            while await serial(url, files) == before:
                await asyncio.sleep(0.05)


def test_rejected_files_are_tried_again_after_a_second_and_not_by_each_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, authority, now_s, temporary_file = 0, StackCa(), 100.0, tempfile.NamedTemporaryFile

    def counted() -> object:
        nonlocal tries
        tries += 1
        return temporary_file()

    files = issued(tmp_path / "router", "router", authority)
    tls = HttpTls(files.tls(), require_client_cert=False, client_names=(), clock=lambda: now_s)
    before = tls.context()
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", counted)
    for num_changes in (1, 2):
        files.replace(_weak())
        assert {tls.context() for _ in range(3)} == {before}
        assert tries == 2 * num_changes - 1
        now_s += 1.0
        assert {tls.context() for _ in range(3)} == {before}
        assert tries == 2 * num_changes
    files.replace(authority.issue("router", HOSTS))
    assert tls.context() is not before


async def test_clients_show_a_certificate_where_that_is_asked_for(tmp_path: Path) -> None:
    authority = StackCa()
    files = issued(tmp_path / "router", "router", authority)
    friend = issued(tmp_path / "friend", "backend", authority)
    other = issued(tmp_path / "other", "stranger", authority)
    stranger = issued(tmp_path / "stranger", "backend", StackCa())
    async with serving(HttpTls(files.tls(), require_client_cert=True, client_names=("backend",))) as url:
        assert await hello(url, files, friend) == "hello"
        for own in (None, other, stranger):
            with pytest.raises(httpx.TransportError):
                await hello(url, files, own)
    async with serving(HttpTls(files.tls(), require_client_cert=True, client_names=())) as url:
        assert await hello(url, files, other) == "hello"


def test_a_name_of_any_kind_admits_as_at_the_grpc_port(tmp_path: Path) -> None:
    files = issued(tmp_path / "router", "router", StackCa())
    tls = HttpTls(files.tls(), require_client_cert=True, client_names=("spiffe://example/backend", "10.1.2.3"))
    for own in (("URI", "spiffe://example/backend"), ("IP Address", "10.1.2.3")):
        assert tls.admits({"subjectAltName": (own,)})
    assert not tls.admits({"subjectAltName": (("URI", "spiffe://example/other"), ("DNS", "backend"))})


@pytest.mark.parametrize("allowed", ["2001:db8::1", "2001:DB8:0:0:0:0:0:1"])
async def test_an_ip_address_admits_however_it_is_written(tmp_path: Path, allowed: str) -> None:
    authority = StackCa()
    files, client = (issued(tmp_path / name, name, authority) for name in ("router", "client"))
    async with serving(HttpTls(files.tls(), require_client_cert=True, client_names=(allowed,))) as url:
        client.replace(authority.issue("client", ("2001:db8::2",)))
        with pytest.raises(httpx.TransportError):
            await hello(url, files, client)
        client.replace(authority.issue("client", ("2001:db8::1",)))
        assert await hello(url, files, client) == "hello"


async def test_handshakes_count_as_connections_and_end_in_time(tmp_path: Path) -> None:
    files = issued(tmp_path / "router", "router", StackCa())
    tls = HttpTls(files.tls(), require_client_cert=False, client_names=())
    async with serving(tls, max_connections=4, read_timeout_s=5.0) as url, asyncio.timeout(TIMEOUT_S):
        host, port = url.removeprefix("https://").removesuffix("/").split(":")
        half_open = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        half_open[0][1].write(b"\x16\x03\x01\x02\x00")  # the beginning of a ClientHello
        further = await asyncio.open_connection(host, int(port))
        assert await further[0].read() == b"", "one more than the limit is served"
        assert not any(reader.at_eof() for reader, _ in half_open), "the first ones have ended before"
        for reader, _ in half_open:
            assert await reader.read() == b"", "a handshake does not end"
        assert await hello(url, files) == "hello"
        for _, writer in (*half_open, further):
            writer.close()
