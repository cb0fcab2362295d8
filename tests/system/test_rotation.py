"""Certificates and the CA are replaced under load without effect for clients: no request fails, no token differs."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import LLM
from tandem.client.channel import ROUTER_SERVICE
from tandem.client.credentials import INSTANCE, OPERATOR, ROUTER, TLS_FOLDER, Credentials
from tandem.client.health import SILENT, health
from tandem.local_stack.pki import StackCa
from tests.certificates import HOSTS, replace
from tests.lively import rig_settings
from tests.system.checker import wait_idle
from tests.system.health_checks import answered_health
from tests.system.load import Load
from tests.system.questions import make_questions
from tests.system.rig import Rig
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
"""Two engines and a router on a machine that may be busy with other things."""
NUM_ROUNDS = 5
NUM_TOKENS = 120
STEP_S = 0.02
"""Every step of the decode instance takes at least as long: answers take seconds, and every change finds some."""
NUM_CLIENTS = 4
NAMES = (ROUTER, INSTANCE, OPERATOR)


@dataclass(frozen=True, slots=True)
class Issuer:
    """Replaces a stack's files while it runs, as badly as an issuer can: one file after the other, half of it first."""

    folder: Path
    source: random.Random

    def believe(self, *authorities: bytes) -> None:
        replace(self.folder / "ca.crt", b"".join(authorities))

    def issue(self, authority: StackCa) -> None:
        for name in self.source.sample(NAMES, len(NAMES)):
            issued = authority.issue(name, HOSTS)
            files = [(f"{name}.crt", issued.certificate), (f"{name}.key", issued.key)]
            for file, content in self.source.sample(files, 2):
                (self.folder / file).write_bytes(content[: len(content) // 2])
                time.sleep(0.05)
                (self.folder / file).write_bytes(content)


@pytest.fixture
def rig(checkpoint: Path) -> Iterator[Rig]:
    settings = rig_settings(checkpoint, tls=True, start_timeout_s=180.0)
    rig = Rig(settings, faults={"decode-0": f"engine.step=sleep:{STEP_S}"})
    rig.start()
    try:
        yield rig
    finally:
        rig.stop()


def log_of(rig: Rig, member: str) -> str:
    return rig.stack.processes[member].spec.log_file.read_text()


def wait_for_answers(load: Load, change: Callable[[], None]) -> None:
    """Makes the change; returns when all requests that ran then have ended, and as many that were sent after it."""
    wait_until(
        lambda: any(outcome.arrivals and not outcome.is_over for outcome in list(load.outcomes)),
        "no stream runs: the change would prove nothing",
    )
    change()
    num_asked = len(load.outcomes)
    wait_until(
        lambda: (
            all(outcome.is_over for outcome in load.outcomes[: num_asked + NUM_CLIENTS])
            and len(load.outcomes) >= num_asked + NUM_CLIENTS
        ),
        "answers do not come",
    )


@pytest.mark.slow
def test_certificates_and_the_ca_are_rotated_under_load(rig: Rig, llm: LLM, tmp_path: Path) -> None:
    questions = make_questions(llm, 12, random.Random(3), num_tokens=NUM_TOKENS)
    folder = rig.stack.folder / TLS_FOLDER
    issuer = Issuer(folder, random.Random(5))
    shutil.copytree(folder, old := tmp_path / "old")
    believed = (folder / "ca.crt").read_bytes()
    with Load(rig.stack.address, questions, NUM_CLIENTS, rig.stack.credentials) as load:
        wait_until(lambda: any(outcome.is_over for outcome in list(load.outcomes)), "the first answer does not come")
        for _ in range(NUM_ROUNDS):
            authority = StackCa("the next one")
            # STEP: both CAs are trusted; then all have a certificate of the new one; then only that one is trusted
            wait_for_answers(load, lambda: issuer.believe(believed, authority.certificate))  # noqa: B023
            wait_for_answers(load, lambda: issuer.issue(authority))  # noqa: B023
            wait_for_answers(load, lambda: issuer.believe(authority.certificate))  # noqa: B023
            believed = authority.certificate
        outcomes = load.finish()

    # STEP: no client has noticed
    for outcome in outcomes:
        outcome.assert_exact()
        assert not outcome.was_cut
    print(f"{len(outcomes)} requests, 0 failed, 0 wrong")
    assert "attempt" not in rig.router_warnings(), "an attempt at a choice has failed"
    wait_idle(rig, within_s=5.0)

    # STEP: it did happen: a client with the old files is rejected, and does not trust the servers
    before = Credentials(old / "ca.crt", old / "operator.crt", old / "operator.key")
    for address in (rig.stack.address, *rig.stack.instances.values()):
        assert health(address, "", credentials=before).startswith(SILENT)
        assert answered_health(address, rig.stack.credentials) == "ready"
    for member in ("router", *rig.stack.instances):
        num_taken = log_of(rig, member).count("the TLS certificate in")
        assert num_taken > NUM_ROUNDS, f"{member} has taken no new files"

    # STEP: one that starts now is found by the new certificates
    rig.kill("decode-0")
    rig.restart("decode-0")
    wait_until(
        lambda: health(rig.stack.address, ROUTER_SERVICE, credentials=rig.stack.credentials) == "ready",
        "the router does not serve",
    )
    # STEP: no log contains a secret
    keys = {
        line for path in (*folder.glob("*.key"), *old.glob("*.key")) for line in path.read_text().splitlines()[1:-1]
    }
    for member in rig.stack.processes:
        log = log_of(rig, member)
        assert not [line for line in keys if line in log]
        assert "PRIVATE KEY" not in log
