"""How a Redis is reached: TLS files that are replaced while a store is in use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.errors import EngineError
from kv_transfer.stores.redis.address import ConnectionFailed, tls_contexts
from kv_transfer.stores.redis.connector import RedisStore
from tandem.local_stack.pki import StackCa
from tests.certificates import Files, files_of
from tests.kv_transfer.stores.contract import HEADER, PAGE, key_of, read
from tests.kv_transfer.stores.redis.redis_server import RedisServer, make_certificate, options_of, redis_server


@pytest.fixture
def files(tmp_path: Path, authority: StackCa) -> Files:
    return files_of(tmp_path, "client", authority)


def options(files: Files) -> dict[str, str]:
    return {"ca_file": str(files.ca), "cert_file": str(files.certificate), "key_file": str(files.key)}


def test_a_context_is_made_anew_where_a_file_has_changed(files: Files, authority: StackCa) -> None:
    current = tls_contexts(**options(files))
    first = current()
    assert current() is first
    files.replace(authority.issue("client"))
    second = current()
    assert second is not first
    files.replace(authority.issue("client"), authority, StackCa("successor"))
    assert len(second.get_ca_certs()) == 1
    assert len(current().get_ca_certs()) == 2


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_half_written_file_leaves_the_last_context(
    files: Files, authority: StackCa, caplog: pytest.LogCaptureFixture, name: str, part: float
) -> None:
    whole = StackCa("successor").certificate * 2 if name == "ca" else getattr(authority.issue("client"), name)
    current = tls_contexts(**options(files))
    first = current()
    getattr(files, name).write_bytes(whole[: int(len(whole) * part)])
    for _ in range(3):
        assert current() is first
    assert [record.getMessage() for record in caplog.records if "the last good content stays" in record.getMessage()]


def test_a_key_of_another_certificate_and_a_missing_file_leave_the_last_context(
    files: Files, authority: StackCa
) -> None:
    current, issued = tls_contexts(**options(files)), authority.issue("client")
    first = current()
    files.key.write_bytes(issued.key)
    assert current() is first
    files.certificate.unlink()
    assert current() is first
    files.certificate.write_bytes(issued.certificate)
    assert current() is not first


def test_files_that_cannot_be_used_at_the_start_are_an_error(files: Files) -> None:
    files.ca.unlink()
    with pytest.raises(EngineError, match="redis TLS files: No such file"):
        tls_contexts(**options(files))


def _present(server: RedisServer, tls: Path) -> None:
    """The server restarts with other files, and requires certificates of their authority."""
    server.kill()
    server.tls = tls
    server.start()
    server.run("CONFIG", "SET", "tls-auth-clients", "yes")


def test_replaced_files_are_used_by_the_next_connection(tmp_path: Path) -> None:
    old, new, own = (tmp_path / name for name in ("old", "new", "own"))
    for folder in (old, new, own):
        folder.mkdir()
    for folder in (old, new):
        make_certificate(folder)
    for name in ("cert.pem", "key.pem"):
        shutil.copy(old / name, own / name)
    certificate, key = str(own / "cert.pem"), str(own / "key.pem")
    tls = {"tls_ca_file": certificate, "tls_cert_file": certificate, "tls_key_file": key}
    with redis_server(tmp_path, tls=old) as server:
        server.run("CONFIG", "SET", "tls-auth-clients", "yes")
        store = RedisStore(options_of(server, **tls))
        store.put(key_of(1), (HEADER, PAGE))
        # STEP another authority at the server
        _present(server, new)
        with pytest.raises(ConnectionFailed, match="tls"):
            store.put(key_of(1), (HEADER, PAGE))
        # STEP half of the new files
        shutil.copy(new / "key.pem", own / "key.pem")
        with pytest.raises(ConnectionFailed, match="tls"):
            store.put(key_of(1), (HEADER, PAGE))
        # STEP all of them
        shutil.copy(new / "cert.pem", own / "cert.pem")
        store.put(key_of(1), (HEADER, PAGE))
        assert read(store, key_of(1)) == (HEADER, PAGE)
        store.close()
