"""The health of a stack's members, without counting the machine's stalls."""

from __future__ import annotations

from tandem.client.credentials import Credentials
from tandem.client.health import SILENT, health
from tests.waiting import wait_until

LATE = f"{SILENT} (DEADLINE_EXCEEDED)"
"""State of a member that did not answer within two seconds, as when it is held up."""


def answered_health(address: str, credentials: Credentials) -> str:
    """The health of the process at `address`, asked until it is not LATE."""
    states: list[str] = []

    def is_in_time() -> bool:
        states.append(health(address, "", credentials=credentials))
        return states[-1] != LATE

    wait_until(is_in_time, f"{address} does not answer")
    return states[-1]
