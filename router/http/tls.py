"""TLS of the HTTP port: the files of the gRPC port, looked at again at each handshake.

    a client says hello ─▶ the files have changed? ─▶ a context of the new ones ─▶ the handshake goes on with it

Connections that stand go on. What becomes current, and when, is for serving/tls.py to say.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Mapping
from typing import Any

from serving.tls import Pair, TlsFiles


class HttpTls:
    """Made by the composition root where the router has TLS files; asked on the event loop."""

    def __init__(self, files: TlsFiles, *, require_client_cert: bool, client_names: tuple[str, ...]) -> None:
        """`client_names`: one of which a client's certificate must carry; empty: every one of the CA will do."""
        self._files = files
        self._require = require_client_cert
        self._names = frozenset(client_names) if require_client_cert else frozenset()
        self._pair = files.current()
        self._current = self._made(self._pair)
        self.context = self._made(self._pair)
        """For the listener; each handshake goes on with the current one."""
        self.context.sni_callback = self._take_current

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client with this certificate, as `ssl` tells of it, may connect."""
        if not self._names:
            return True
        told = certificate or {}
        carried = {value for kind, value in told.get("subjectAltName", ()) if kind == "DNS"}
        carried |= {value for part in told.get("subject", ()) for kind, value in part if kind == "commonName"}
        return not self._names.isdisjoint(carried)

    def _take_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        pair = self._files.current()
        if pair is not self._pair:
            self._pair, self._current = pair, self._made(pair)
        connection.context = self._current

    def _made(self, pair: Pair) -> ssl.SSLContext:
        assert pair.chain is not None, "a server has a certificate: the settings see to that"
        assert pair.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Client certificates are asked for where they are needed alone: browsers ask their user when they are wanted.
        context.verify_mode = ssl.CERT_REQUIRED if self._require else ssl.CERT_NONE
        context.load_verify_locations(cadata=pair.ca.decode())
        with tempfile.NamedTemporaryFile() as file:  # `ssl` takes these from files alone; this one is 0600
            file.write(pair.chain + b"\n" + pair.key)
            file.flush()
            context.load_cert_chain(file.name)
        return context
