"""The connection of a client that blocks: a new one when its TLS files have changed, the old one until it is not used.

The event loop's counterpart is serving/redialled.py. What TLS needs is imported late: a client that speaks plaintext
has no use for a tenth of a second of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tandem.credentials import Credentials

if TYPE_CHECKING:
    from serving.tls import Pair, TlsFiles

Options = tuple[tuple[str, int | str], ...]


def tls_files(credentials: Credentials) -> TlsFiles | None:
    """The client's files, read; None for plaintext. Raises ValueError, which names the file."""
    if credentials.ca_file is None:
        return None
    from serving.tls import TlsFiles

    return TlsFiles(credentials.ca_file, credentials.cert_file, credentials.key_file)


def tls_options(credentials: Credentials) -> Options:
    """gRPC's options that go with them."""
    name = credentials.server_name
    return () if name is None else (("grpc.ssl_target_name_override", name),)


def open_blocking_channel(
    target: str, options: Options, credentials: Credentials, pair: Pair | None = None
) -> grpc.Channel:
    """A channel with the files as they are now, or as they were in `pair`. Raises ValueError."""
    if pair is None and (files := tls_files(credentials)) is not None:
        pair = files.current()
    if pair is None:
        return grpc.insecure_channel(target, options=options)
    from serving.channel import channel_credentials

    options = (*options, *tls_options(credentials))
    return grpc.secure_channel(target, channel_credentials(pair), options=options)


def open_async_channel(target: str, options: Options, credentials: Credentials) -> grpc.aio.Channel:
    """A channel for the running event loop, which follows the files. Raises ValueError."""
    files = tls_files(credentials)
    if files is None:
        return grpc.aio.insecure_channel(target, options=options)
    from serving.channel import channel_credentials
    from serving.redialled import RedialledChannel

    options = (*options, *tls_options(credentials))

    def dial(pair: Pair) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(target, channel_credentials(pair), options=options)

    return RedialledChannel(files, dial)


class _Line:
    """A channel and how many calls use it."""

    def __init__(self, channel: grpc.Channel, pair: Pair | None) -> None:
        self.channel = channel
        self.pair = pair
        self.num_users = 0


class Line:
    """Safe to share between threads."""

    def __init__(self, target: str, options: Options, credentials: Credentials) -> None:
        """Raises ValueError where a file cannot be used."""
        self._dial: Callable[[Pair | None], grpc.Channel] = lambda pair: open_blocking_channel(
            target, options, credentials, pair
        )
        self._files = tls_files(credentials)
        self._lock = threading.Lock()
        self._line = self._new()

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """The channel for one call, which is over at the end of the `with`."""
        with self._lock:
            if self._files is not None and self._files.current() is not self._line.pair:
                retired, self._line = self._line, self._new()
                self._close_if_idle(retired)
            line = self._line
            line.num_users += 1
        try:
            yield line.channel
        finally:
            with self._lock:
                line.num_users -= 1
                self._close_if_idle(line)

    def close(self) -> None:
        """Ends the calls of the connection that is in use now; those on an older one end by themselves."""
        self._line.channel.close()

    def _new(self) -> _Line:
        pair = None if self._files is None else self._files.current()
        return _Line(self._dial(pair), pair)

    def _close_if_idle(self, line: _Line) -> None:
        if line is not self._line and line.num_users == 0:
            line.channel.close()
