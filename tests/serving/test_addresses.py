"""What counts as private: an allow list, in which nothing is by accident."""

from __future__ import annotations

import pytest

from serving.addresses import is_ip, is_private, listens_privately


@pytest.mark.parametrize(
    "ip",
    ["127.0.0.1", "127.9.9.9", "::1", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.9", "100.64.0.1",
     "fd00::1", "::ffff:10.0.0.1"],
)  # fmt: skip
def test_private(ip: str) -> None:
    assert is_private(ip)
    assert listens_privately(ip)


@pytest.mark.parametrize(
    "ip",
    ["0.0.0.0", "::", "8.8.8.8", "172.32.0.1", "172.15.255.255", "169.254.169.254", "fe80::1%eth0", "100.128.0.1",
     "2001:db8::1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "255.255.255.255", "224.0.0.1"],
)  # fmt: skip
def test_not_private(ip: str) -> None:
    assert not is_private(ip)
    assert not listens_privately(ip)


def test_a_name_is_as_private_as_what_it_stands_for() -> None:
    assert not is_ip("localhost")
    assert listens_privately("localhost")
    with pytest.raises(OSError, match=r"."):
        listens_privately("no-such-host.invalid")
