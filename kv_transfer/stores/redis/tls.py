"""TLS to Redis by files that may be replaced while connections are made."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError
from serving.file_watcher import FileWatcher
from serving.settings import SettingsError


def tls_contexts(*, ca_file: str = "", cert_file: str = "", key_file: str = "") -> Callable[[], ssl.SSLContext]:
    """A function that returns the context for a new connection: of the files as they are, or, while one of them is half
    written or the key is another certificate's, as they were last usable. Raises EngineError where they are not yet.

    Every context verifies the server and its name, against `ca_file` alone if there is one: redis-py's own options
    would trust the system's authorities as well.
    """

    def read() -> ssl.SSLContext:
        try:
            return _context(ca_file, cert_file, key_file)
        except OSError as error:  # an SSLError is one, too
            raise SettingsError(f"redis TLS files: {error.strerror or error}") from error

    paths = [Path(path) for path in (ca_file, cert_file, key_file) if path]
    try:
        return FileWatcher(paths, read).current
    except SettingsError as error:
        raise EngineError(str(error)) from error


def _context(ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file or None)
    if cert_file:
        context.load_cert_chain(cert_file, key_file or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
