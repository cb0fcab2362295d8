"""The certificates of one stack."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from tandem.local_stack.pki import write_stack_files


def test_a_machine_whose_name_is_not_ascii_has_certificates_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "büro")
    write_stack_files(tmp_path / "tls", "127.0.0.1")
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls/router.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["router", "localhost"]


def test_certificates_stay_valid_where_the_clock_is_set_back_after_the_start(tmp_path: Path) -> None:
    """As by NTP, on a machine whose clock had another time zone's hour."""
    write_stack_files(tmp_path / "tls", "127.0.0.1")
    files = [*(tmp_path / "tls").glob("*.crt")]
    assert len(files) == 4
    hours_back = datetime.now(UTC) - timedelta(hours=14)
    for file in files:
        assert x509.load_pem_x509_certificate(file.read_bytes()).not_valid_before_utc < hours_back, file.name
