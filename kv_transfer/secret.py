"""The key of the pages' digests: 32 bytes in a file that only its owner can read, as 64 hex digits.

`tandem up` makes it; on Kubernetes it is a Secret's file (behind symlinks, so those are followed).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from engine.errors import EngineError

KEY_BYTES = 32
_MAX_FILE_BYTES = 256


def load_secret(path: str | Path) -> bytes:
    """The key: 64 hex digits, or 32 raw bytes. Raises EngineError that names the command that makes one."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise EngineError(
            f"kv_secret_file {os.fspath(path)!r}: {error.strerror}; make one with `openssl rand -hex 32`, mode 0600,"
            " the same for all instances"
        ) from error
    if len(content) == KEY_BYTES:
        return content
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(content.decode("ascii"))
        if len(key) == KEY_BYTES:
            return key
    raise EngineError(f"kv_secret_file {os.fspath(path)!r} holds neither 64 hex digits nor 32 bytes")


def ensure_secret(path: str | Path) -> bytes:
    """The key in `path`, made (mode 0600) if there is none. Processes may call it concurrently."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written under a name of its own, then linked: a half-written key is never visible, and the first one stays.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    return load_secret(path)
