"""Who may connect to the router's ports, and how the router identifies itself.

    clients' port    TLS if there are files; a token if there is a file of tokens; a certificate if one is required
    signals          with TLS a certificate; without it only private addresses; between workers plaintext, on loopback
    endpoint picker  every Gateway that reaches it; without TLS only on private addresses
    admin listener   a token if it has a file of its own, else with TLS a certificate, else only private addresses
    live page        a token of the operators' file; without one only private addresses, and no tokens or TLS
    instances        dialled with the router's certificate, verified against the CA

docs/security.md has the whole picture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import grpc.aio

from serving.auth import BearerTokens, Metadata, all_authorizers, certificate_authorizer
from serving.channel import ChannelSettings, is_ip, listens_privately, open_channel
from serving.errors import PermissionDenied
from serving.interceptor import Authorizer
from serving.server import HealthSettings, Server, ServerSettings, ServerTls
from serving.settings import Section, SettingsError, parse_address, setting
from serving.tls import TlsSettings

_log = logging.getLogger(__name__)
_PROTECTED = "server.allow_plaintext where the network is protected otherwise"


class RouterTlsSettings(TlsSettings):
    """TLS of the router: to its clients, its operators and its instances."""

    require_client_cert: bool = setting(
        False,
        "Reject clients without a certificate of ca_file, and operators too. Off: operators alone need one, unless "
        "auth.admin_tokens_file is set.",
    )


class AuthSettings(Section):
    """Bearer tokens. A file has a line `tenant: sha256 of a token` for each, and is read again when it changes."""

    tokens_file: Path | None = setting(
        None, "Tokens of clients; they name the tenants, and admission.tenant_key is ignored. none: all may call."
    )
    admin_tokens_file: Path | None = setting(
        None, "Tokens of operators; none: with TLS they show a certificate instead, without one all may call."
    )


class Security:
    """Servers and channels by the settings `tls` and `auth`. Raises SettingsError if a file cannot be used."""

    def __init__(self, tls: RouterTlsSettings, auth: AuthSettings, *, is_worker: bool = False) -> None:
        """`is_worker`: other workers listen on the same ports, and exchange signals over loopback."""
        self._tls = tls
        self._is_worker = is_worker
        self.files = tls.files()
        self.tokens = BearerTokens(auth.tokens_file, "auth.tokens_file") if auth.tokens_file else None
        self._admin_tokens = (
            BearerTokens(auth.admin_tokens_file, "auth.admin_tokens_file") if auth.admin_tokens_file else None
        )

    def clients_server(self, settings: ServerSettings, probes: HealthSettings) -> Server:
        self._warn_of_plaintext(self.tokens, settings.host)
        return self._server(settings, self.tokens, require_cert=self._tls.require_client_cert, probes=probes)

    def http_authorizer(self, listen: str) -> Callable[[Metadata], object] | None:
        """Checks calls of the OpenAI API at `listen`; None: all may call."""
        self._warn_of_plaintext(self.tokens, parse_address(listen)[0])
        return None if self.tokens is None else self.tokens.tenant_of

    def admin_server(self, settings: ServerSettings) -> Server:
        """The server of the operators' calls. Raises SettingsError if unauthenticated clients could reach it."""
        is_open = self.files is None and self._admin_tokens is None
        if is_open and not listens_privately(settings.host):
            raise SettingsError(
                f"router.admin_listen: {settings.host} is not a private address, and operators' calls are open to all "
                "there: give auth.admin_tokens_file, or tls.cert_file, key_file and ca_file"
            )
        self._warn_of_plaintext(self._admin_tokens, settings.host)
        require_cert = self._admin_tokens is None or self._tls.require_client_cert
        return self._server(settings, self._admin_tokens, require_cert=require_cert)

    def page_authorizer(self, listen: str) -> Callable[[Metadata], object]:
        """Checks calls of the live page at `listen`. Raises SettingsError if unauthenticated clients could reach it."""
        if self._admin_tokens is not None:
            return self._admin_tokens.tenant_of
        if self.files is not None or self.tokens is not None or not listens_privately(parse_address(listen)[0]):
            raise SettingsError(
                "http.page: with TLS or tokens, or on an address that is not private, the live page needs operators' "
                "tokens: give auth.admin_tokens_file, or leave http.page out"
            )
        return check_same_origin

    def signals_server(self, settings: ServerSettings) -> Server:
        """The server for the other routers. Raises SettingsError if unauthenticated clients could reach it."""
        is_open = self.files is None or self._is_worker  # no certificate need be valid for 127.0.0.1
        if is_open and not settings.allow_plaintext and not listens_privately(settings.host):
            raise SettingsError(
                f"signals.listen: {settings.host} is not a private address, and calls are open to all there: give "
                f"tls.cert_file, key_file and ca_file, or {_PROTECTED}"
            )
        return (
            Server(settings, reuse_port=self._is_worker) if is_open else self._server(settings, None, require_cert=True)
        )

    def picker_server(self, settings: ServerSettings) -> Server:
        """The server for Gateways, which have no certificates; they learn addresses of routers. Raises SettingsError if
        it is not private and in plaintext."""
        if self.files is None and not settings.allow_plaintext and not listens_privately(settings.host):
            raise SettingsError(
                f"endpoint_picker.listen: {settings.host} is not a private address: give tls.cert_file, key_file and "
                f"ca_file, or {_PROTECTED}"
            )
        return self._server(settings, None, require_cert=False)

    def dial(self, address: str, settings: ChannelSettings) -> grpc.aio.Channel:
        """A channel to an instance."""
        return open_channel(address, settings, tls=self.files, peer_name=self._tls.peer_name)

    def dial_router(self, address: str, settings: ChannelSettings, name: str | None) -> grpc.aio.Channel:
        """A channel to another router, whose certificate must carry `name`, or to another worker."""
        return open_channel(address, settings, tls=None if self._is_worker else self.files, peer_name=name)

    def _warn_of_plaintext(self, tokens: BearerTokens | None, host: str) -> None:
        if tokens is not None and self.files is None and not listens_privately(host):
            _log.warning("tokens are sent in plaintext to %s: give tls.cert_file, key_file and ca_file", host)

    def _server(
        self,
        settings: ServerSettings,
        tokens: BearerTokens | None,
        *,
        require_cert: bool,
        probes: HealthSettings | None = None,
    ) -> Server:
        tls = None if self.files is None else ServerTls(self.files, require_cert)
        names: Authorizer | None = None
        if tls is not None and require_cert and self._tls.client_names:
            names = certificate_authorizer(self._tls.client_names)
        authorizer = all_authorizers(names, tokens.authorize if tokens is not None else None)
        return Server(settings, tls=tls, authorizer=authorizer, probes=probes, reuse_port=self._is_worker)


def check_same_origin(metadata: Metadata) -> None:
    """Where no token is asked for: rejects what the script of another web page sends from an operator's browser, under
    its own name (Origin) or under one that it has bound to this address (Host). Raises PermissionDenied."""
    headers = dict(metadata)
    host, origin = str(headers.get("host", "")), headers.get("origin")
    name = _split(f"//{host}").hostname or ""
    if not (is_ip(name) or name == "localhost"):
        raise PermissionDenied(
            f"host {name[:64]!r}: without auth.admin_tokens_file the live page is served to an IP address or localhost"
        )
    if origin is not None and _split(str(origin)).netloc != host:
        raise PermissionDenied("origin: pages of other sites may not call this")


def _split(url: str) -> SplitResult:
    """Empty for what is no URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")
