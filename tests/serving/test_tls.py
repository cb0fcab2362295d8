"""TLS files: what is taken, what is refused, and that a half-written state never comes into use."""

from __future__ import annotations

import base64
import logging
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from serving.settings import SettingsError
from serving.tls import TlsFiles, TlsSettings
from tandem.local_stack.pki import StackCa
from tests.certificates import Files, files_of, long_ago, replace


@pytest.fixture
def files(tmp_path: Path, authority: StackCa) -> Files:
    return files_of(tmp_path, "service", authority)


def test_three_files_or_none() -> None:
    assert TlsSettings().files() is None
    with pytest.raises(ValueError, match=r"missing: tls\.key_file \(TANDEM_TLS__KEY_FILE\), tls\.ca_file"):
        TlsSettings(cert_file=Path("a"))
    with pytest.raises(ValueError, match="peer_name and client_names need"):
        TlsSettings(peer_name="instance")
    with pytest.raises(ValueError, match="peer_name and client_names need"):
        TlsSettings(client_names=("router",))


def test_what_cannot_be_used_at_the_start_names_setting_and_file(files: Files, authority: StackCa) -> None:
    good = files.key.read_bytes()
    for path, content, problem in (
        (files.key, b"", r"tls\.key_file: .*service\.key contains no complete PEM private key"),
        (files.key, good[:-40], r"tls\.key_file: .*contains no complete PEM private key"),
        (files.key, authority.issue("other").key, r"tls\.key_file: .* is not the key of the certificate in"),
        (
            files.certificate,
            b"-----BEGIN CERTIFICATE-----\nAA",
            r"tls\.cert_file: .*contains no complete PEM certificate",
        ),
        (files.ca, authority.certificate * 2 + authority.certificate[:200], r"tls\.ca_file: .*no complete PEM"),
    ):
        before = path.read_bytes()
        replace(path, content)
        with pytest.raises(SettingsError, match=problem) as caught:
            files.tls()
        assert not _key_lines_in(str(caught.value), good)
        replace(path, before)
    files.tls()
    files.ca.unlink()
    with pytest.raises(SettingsError, match=r"tls\.ca_file: .*cannot be read: No such file"):
        files.tls()


def _patched(pem: bytes, old: str, new: str) -> bytes:
    """`pem` with other bytes, both in hexadecimal, in its content."""
    begin, content, end = re.split(rb"(?<=-----)\n|\n(?=-----)", pem.strip())
    der = base64.b64decode(content)
    assert bytes.fromhex(old) in der
    return b"\n".join([begin, base64.b64encode(der.replace(bytes.fromhex(old), bytes.fromhex(new))), end])


_CURVE = ("2a8648ce3d030107", "2a8648ce3d03017f")
"""P-256's object identifier, and an unknown one."""
_EXTENSION = ("0603551d13", "0603551d11")
"""The identifiers of two extensions: a certificate with the second twice."""


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("key", _CURVE, r"tls\.key_file: .*service\.key contains no complete PEM private key"),
        ("certificate", _CURVE, r"tls\.cert_file: .*service\.crt contains an invalid or unsupported certificate"),
        ("certificate", _EXTENSION, r"tls\.cert_file: .*service\.crt contains an invalid or unsupported certificate"),
    ],
)
def test_what_is_not_supported_is_rejected_like_what_is_incomplete(
    files: Files, name: str, change: tuple[str, str], problem: str
) -> None:
    path = getattr(files, name)
    watched, patched = files.tls(), _patched(path.read_bytes(), *change)
    first = watched.current()
    replace(path, patched)
    assert watched.current() is first
    assert watched.num_rejected == 1
    with pytest.raises(SettingsError, match=problem):
        files.tls()


def test_an_unchanged_pair_is_the_same_object_and_a_new_one_is_taken(files: Files, authority: StackCa) -> None:
    watched = files.tls()
    first = watched.current()
    assert watched.current() is first
    files.replace(authority.issue("service"))
    second = watched.current()
    assert second.chain == files.certificate.read_bytes() != first.chain
    assert (watched.num_reloads, watched.num_rejected) == (1, 0)


def test_rejected_files_are_counted_for_prometheus(files: Files, authority: StackCa) -> None:
    registry = CollectorRegistry()
    registry.register(files.tls())
    replace(files.key, authority.issue("other").key)
    assert "tandem_tls_refused_reloads_total 1.0" in generate_latest(registry).decode()


def test_a_key_of_another_certificate_is_not_taken_and_one_warning_says_so(
    files: Files, authority: StackCa, caplog: pytest.LogCaptureFixture
) -> None:
    watched = files.tls()
    first, issued = watched.current(), authority.issue("service")
    replace(files.key, issued.key)
    for _ in range(5):
        assert watched.current() is first
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "is not the key of the certificate" in warnings[0]
    replace(files.certificate, issued.certificate)
    assert watched.current().chain == issued.certificate
    assert (watched.num_reloads, watched.num_rejected) == (1, 1)


def test_vanished_files_leave_the_last_good_ones(files: Files) -> None:
    watched = files.tls()
    first = watched.current()
    files.certificate.unlink()
    assert watched.current() is first
    assert watched.num_rejected == 1


_AUTHORITIES = (StackCa("old"), StackCa("new"))
_ISSUED = [authority.issue("service") for authority in _AUTHORITIES for _ in range(2)]
_STATES = [
    (issued.certificate, issued.key, _AUTHORITIES[index // 2].certificate) for index, issued in enumerate(_ISSUED)
]


@settings(max_examples=60)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0.0, 0.3, 0.99, 1.0]), st.booleans()),
        max_size=12,
    )
)
def test_whatever_is_written_in_whatever_order_key_and_certificate_in_use_belong_together(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int, float, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / name for name in ("crt", "key", "ca")]
    for path, content in zip(paths, _STATES[0], strict=True):
        path.write_bytes(content)
    watched = TlsFiles(paths[2], paths[0], paths[1])
    for which, state, part, in_place in writes:
        whole = _STATES[state][which]
        content = whole[: int(len(whole) * part)]
        paths[which].write_bytes(content) if in_place else replace(paths[which], content)
        pair = watched.current()
        assert (pair.chain, pair.key) in [(certificate, key) for certificate, key, _ in _STATES]
        assert pair.ca in [ca for _, _, ca in _STATES]
    last = random.Random(len(writes)).choice(_STATES)
    for path, content in zip(paths, last, strict=True):
        replace(path, content)
    pair = watched.current()
    assert (pair.chain, pair.key, pair.ca) == last


def test_the_expiry_of_a_certificate_is_logged_once_per_state(
    tmp_path: Path, authority: StackCa, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = datetime.now(UTC)
    late = {"not_before": now - timedelta(days=99), "not_after": now + timedelta(days=1)}
    watched = files_of(tmp_path, "late", authority, **late).tls()
    for _ in range(3):
        watched.current()
    files_of(tmp_path, "over", authority, **long_ago()).tls().current()
    files_of(tmp_path, "fresh", authority).tls().current()
    logged = [
        (record.levelname, re.search(r"of (\w+), localhost, ([a-z ]+):", record.getMessage()))
        for record in caplog.records
    ]
    assert [(level, *found.groups()) for level, found in logged if found] == [
        ("WARNING", "late", "expires soon"),
        ("ERROR", "over", "expired"),
        ("INFO", "fresh", "is valid"),
    ]


def test_a_certificate_that_is_not_yet_valid_is_logged_with_its_begin(
    tmp_path: Path, authority: StackCa, caplog: pytest.LogCaptureFixture
) -> None:
    begin = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    watched = files_of(tmp_path, "early", authority, not_before=begin).tls()
    material = watched.current()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert f"early, localhost, not yet valid: from {begin} until" in record.getMessage()
    assert material.state(begin) == "is valid"
    assert material.state(begin - timedelta(seconds=1)) == "not yet valid"


def test_a_world_readable_key_is_warned_of(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.key.chmod(0o640)  # as a mounted Secret is its group's
    files.tls()
    assert not caplog.records
    files.key.chmod(0o644)
    files.tls()
    assert "is readable by all users" in caplog.text


def test_metrics_tell_the_end_of_the_certificate_and_what_became_of_new_files(files: Files, authority: StackCa) -> None:
    registry = CollectorRegistry()
    registry.register(files.tls())
    files.replace(authority.issue("service"))  # taken at the scrape
    text = generate_latest(registry).decode()
    [ends_s] = re.findall(r"^tandem_tls_certificate_expiry_timestamp_seconds (\S+)", text, re.MULTILINE)
    assert 364 * 86400 < float(ends_s) - datetime.now(UTC).timestamp() < 366 * 86400
    assert "tandem_tls_reloads_total 1.0" in text
    assert "tandem_tls_refused_reloads_total 0.0" in text


def test_a_pair_shows_no_key(files: Files) -> None:
    pair, key = files.tls().current(), files.key.read_bytes()
    assert _key_lines_in(repr(key), key), "it would be seen"
    assert not _key_lines_in(repr(pair), key)


def _key_lines_in(text: str, pem: bytes) -> list[str]:
    return [line for line in pem.decode().splitlines() if "-----" not in line and line in text]
