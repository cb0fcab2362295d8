"""Authorization at the HTTP port: tokens as at the gRPC port, and certificates, which are reloaded while it runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from router.api.openai.server import HttpServer, HttpSettings, HttpTls
from tandem.local_stack.pki import StackCa
from tests.certificates import HOSTS, Files, files_of
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
