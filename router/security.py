"""The router's doors: who may come in by which, and how the router shows who it is.

    clients' port    TLS if there are files; a token if there is a file of tokens; a certificate if it is asked for
    admin listener   a token if it has a file of its own, else with TLS a certificate; with neither, private addresses
    instances        dialled with the router's certificate, believed by theirs

docs/security.md tells it as a whole.
"""

from __future__ import annotations

import logging
from pathlib import Path

import grpc.aio

from serving.addresses import listens_privately
from serving.calls import Gate
from serving.channel import ChannelSettings, open_channel
from serving.credentials import Tokens, all_of, certificate_gate
from serving.server import Server, ServerTls
from serving.server_settings import HealthSettings, ServerSettings
from serving.settings import Section, SettingsError, setting
from serving.tls import TlsSettings

_log = logging.getLogger(__name__)


class RouterTlsSettings(TlsSettings):
    """TLS of the router: to its clients, its operators and its instances."""

    require_client_cert: bool = setting(
        False, "Refuse clients without a certificate of ca_file at the clients' port too; operators need one anyway."
    )


class AuthSettings(Section):
    """Bearer tokens. A file has a line `tenant: sha256 of a token` for each, and is read again when it changes."""

    tokens_file: Path | None = setting(
        None, "Tokens of clients: whose the tenants are, admission.tenant_key then being ignored; none: all may call."
    )
    admin_tokens_file: Path | None = setting(
        None, "Tokens of operators; none: with TLS they show a certificate instead, without one all may call."
    )


class Security:
    """What the settings `tls` and `auth` make. Raises SettingsError where a file cannot be used."""

    def __init__(self, tls: RouterTlsSettings, auth: AuthSettings) -> None:
        self._tls = tls
        self.files = tls.files()
        self.tokens = Tokens(auth.tokens_file, "auth.tokens_file") if auth.tokens_file else None
        self._admin_tokens = (
            Tokens(auth.admin_tokens_file, "auth.admin_tokens_file") if auth.admin_tokens_file else None
        )

    def clients_server(self, settings: ServerSettings, probes: HealthSettings) -> Server:
        """The server of the clients' port."""
        if self.tokens is not None and self.files is None and not listens_privately(settings.host):
            _log.warning("tokens are sent in plaintext to %s: give tls.cert_file, key_file and ca_file", settings.host)
        return self._server(settings, self.tokens, require_cert=self._tls.require_client_cert, probes=probes)

    def admin_server(self, settings: ServerSettings) -> Server:
        """The server of the operators' calls. Raises SettingsError where strangers could make them."""
        is_open = self.files is None and self._admin_tokens is None
        if is_open and not listens_privately(settings.host):
            raise SettingsError(
                f"router.admin_listen: {settings.host} is not a private address, and operators' calls are open to all "
                "there: give auth.admin_tokens_file, or tls.cert_file, key_file and ca_file"
            )
        require_cert = self._admin_tokens is None or self._tls.require_client_cert
        return self._server(settings, self._admin_tokens, require_cert=require_cert)

    def dial(self, address: str, settings: ChannelSettings) -> grpc.aio.Channel:
        """A channel to an instance."""
        return open_channel(address, settings, tls=self.files, peer_name=self._tls.peer_name)

    def _server(
        self,
        settings: ServerSettings,
        tokens: Tokens | None,
        *,
        require_cert: bool,
        probes: HealthSettings | None = None,
    ) -> Server:
        tls = None if self.files is None else ServerTls(self.files, require_cert)
        names: Gate | None = None
        if tls is not None and require_cert and self._tls.client_names:
            names = certificate_gate(self._tls.client_names)
        gate = all_of(names, tokens.gate if tokens is not None else None)
        return Server(settings, tls=tls, gate=gate, probes=probes)
