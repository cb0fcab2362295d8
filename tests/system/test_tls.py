"""A real stack with mTLS and bearer tokens: its clients are served as without them, and tenants are isolated."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import CliRunner

from tandem import Client, TandemError
from tandem.client.completion import Completion
from tandem.client.credentials import TLS_FOLDER, Credentials
from tandem.client.health import READY, SILENT, health
from tandem.commands.pools import command as pools_command
from tandem.commands.up import usage_text
from tests.engine_under_test import BLOCK_SIZE
from tests.files_below import files_below
from tests.lively import random_prompt, rig_settings
from tests.system.checker import assert_same_answer
from tests.system.health_checks import answered_health
from tests.system.reference import Reference
from tests.system.rig import Rig
from tests.system.test_tandem_up import Up

pytestmark = pytest.mark.timeout(300)
TOKENS = {"alice": "alices-token", "bob": "bobs-token"}
OPERATOR = "operators-token"


def tokens_file(path: Path, **tokens: str) -> Path:
    path.write_text("".join(f"{who}: {hashlib.sha256(token.encode()).hexdigest()}\n" for who, token in tokens.items()))
    return path


@pytest.fixture(scope="module")
def rig(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One prefill and one decode instance and an HTTP port; requests are handed over, so all connections are used."""
    folder = tmp_path_factory.mktemp("tokens")
    clients = tokens_file(folder / "clients", **TOKENS)
    operators = tokens_file(folder / "operators", ops=OPERATOR)
    args = ("--auth-tokens-file", str(clients), "--auth-admin-tokens-file", str(operators))
    rig = Rig(rig_settings(checkpoint, tls=True, http_port=0, router_args=args))
    rig.start()
    try:
        yield rig
    finally:
        rig.stop()


def credentials(rig: Rig, **fields: str) -> Credentials:
    """Of a client that trusts the stack's CA, and nothing more."""
    return Credentials(ca_file=rig.stack.folder / TLS_FOLDER / "ca.crt", **fields)  # type: ignore[arg-type]


def generated(rig: Rig, tenant: str, prompt: list[int], **fields: object) -> Completion:
    with Client(rig.stack.address, credentials=credentials(rig, token=TOKENS[tenant])) as client:
        return client.generate(prompt, max_tokens=8, temperature=0.0, **fields)  # type: ignore[arg-type]


def num_stored(rig: Rig) -> int:
    """Pages of full blocks in the store that the instances share."""
    return sum("transfers" not in path.parts for path in files_below(rig.store_folder))


def test_a_tenant_finds_its_own_prefix_and_never_anothers(
    rig: Rig, reference: Reference, prompts: random.Random
) -> None:
    prompt = random_prompt(prompts, 20 * BLOCK_SIZE)
    answer = reference.answer(prompt, max_tokens=8, temperature=0.0)
    # STEP: alice's second request finds the blocks of her first one
    for _ in range(2):
        completion = generated(rig, "alice", prompt)
        assert_same_answer(completion, answer)
    assert completion.choices[0].usage.cached_tokens >= 18 * BLOCK_SIZE
    before = num_stored(rig)
    # STEP: bob's first one finds none, in memory or in the store, with any salt; nor does alice with another salt
    for tenant, salt in (("bob", ""), ("bob", "alice"), ("alice", "another")):
        completion = generated(rig, tenant, prompt, cache_salt=salt)
        assert_same_answer(completion, answer)
        assert completion.choices[0].usage.cached_tokens == 0, (tenant, salt)
        assert num_stored(rig) > before, "its blocks are stored under other names"
        before = num_stored(rig)


@pytest.mark.parametrize("token", [None, "unknown"])
def test_without_a_known_token_nothing_is_answered(rig: Rig, token: str | None) -> None:
    fields = {} if token is None else {"token": token}
    with Client(rig.stack.address, credentials=credentials(rig, **fields)) as client:
        for call in (client.model_info, lambda: client.generate([1, 2]), lambda: client.abort("r")):
            with pytest.raises(TandemError, match="bearer token") as caught:
                call()
            assert caught.value.status == "UNAUTHENTICATED"


def test_operators_have_tokens_of_their_own(rig: Rig, tmp_path: Path) -> None:
    ca_file = str(rig.stack.folder / TLS_FOLDER / "ca.crt")
    for token, expected in ((OPERATOR, "decode-0"), (TOKENS["alice"], "unknown bearer token")):
        (tmp_path / "token").write_text(token)
        options = ["--admin", rig.stack.admin_address, "--ca-file", ca_file, "--token-file", str(tmp_path / "token")]
        assert expected in CliRunner().invoke(pools_command, options).output


def test_instances_reject_clients_without_a_certificate_of_the_stack(rig: Rig) -> None:
    for address in rig.stack.instances.values():
        assert answered_health(address, rig.stack.credentials) == READY
        assert health(address, "", credentials=credentials(rig)).startswith(SILENT)
        assert health(address, "").startswith(SILENT)


def test_no_log_contains_a_token_or_a_key(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(TandemError), Client(rig.stack.address, credentials=credentials(rig, token="a-guess")) as client:
        client.model_info()
    folder = rig.stack.folder / TLS_FOLDER
    keys = [line for path in folder.glob("*.key") for line in path.read_text().splitlines()[1:-1]]
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in (*TOKENS.values(), OPERATOR)]
    secrets = ["PRIVATE KEY", "a-guess", *keys, *TOKENS.values(), OPERATOR, *digests]
    for member in rig.stack.processes.values():
        log = member.spec.log_file.read_text()
        assert "listening on" in log
        assert not [secret for secret in secrets if secret in log]


@pytest.mark.slow
def test_up_with_tls_configures_all_commands(short_folder: Path) -> None:
    up = Up(short_folder, "--tls")
    try:
        up.wait_for("Ctrl-C ends it")
        [state_file] = (short_folder / "run").rglob("stack-*.json")
        stack = json.loads(state_file.read_text())
        files = Path(stack["folder"]) / TLS_FOLDER
        # STEP: commands of the same user find what they need
        for arguments, expected in (
            (("generate", "Once upon a time", "--max-tokens", "8"), ""),
            (("generate", "Once upon a time", "--max-tokens", "8", "--address", stack["address"]), ""),
            (("pools",), "decode-0"),
        ):
            answer = up.tandem(*arguments)
            assert answer.returncode == 0, answer.stderr
            assert expected in answer.stdout
        doctor = up.doctor()
        assert doctor.exit_code == 0, doctor.stdout
        assert "prefill-0" in doctor.stdout
        [line] = [line for line in up.lines if "curl --cacert" in line]
        _, _, ca_file, url, *_ = line.split()
        models = httpx.get(url.replace("chat/completions", "models"), verify=ssl.create_default_context(cafile=ca_file))
        assert models.json()["data"][0]["id"] == "demo"
        # STEP: others are rejected: the router requires TLS, its admin port a certificate
        plain = up.tandem("generate", "hello", "--address", stack["address"].replace("127.0.0.1", "localhost"))
        assert plain.returncode == 1
        assert "speaks TLS: give the CA to trust as ca_file (--ca-file)" in plain.stderr
        bare = up.tandem("pools", "--admin", stack["admin_address"], "--ca-file", str(files / "ca.crt"))
        assert "requires a client certificate: give cert_file and key_file (--cert-file, --key-file)" in bare.stderr
        # STEP: only the owner may read the files, and the state file has paths
        assert files.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in files.iterdir()} == {0o600}
        assert "BEGIN" not in state_file.read_text()
        up.end(signal.SIGINT)
        assert not files.exists()
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        assert up.process.stdout is not None
        up.process.stdout.close()


def test_the_http_port_speaks_tls_as_the_stacks_banner_shows(rig: Rig) -> None:
    ca_file = rig.stack.credentials.ca_file
    assert ca_file is not None
    assert f"curl --cacert {ca_file} https://{rig.stack.http_address}/v1/" in usage_text(rig.stack)
    context = ssl.create_default_context(cafile=str(ca_file))
    headers = {"Authorization": f"Bearer {TOKENS['alice']}"}
    with httpx.Client(base_url=f"https://{rig.stack.http_address}", verify=context, timeout=60) as client:
        answer = client.post("/v1/completions", headers=headers, json={"prompt": "Once upon a time", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{rig.stack.http_address}/health", timeout=60)


def test_clients_of_other_kinds_need_the_ca_alone(rig: Rig) -> None:
    """Plain gRPC, as a backend in any language speaks it."""
    root = (rig.stack.folder / TLS_FOLDER / "ca.crt").read_bytes()
    with grpc.secure_channel(rig.stack.address, grpc.ssl_channel_credentials(root)) as channel:
        call = channel.unary_unary("/tandem.v1.GenerationService/GetModelInfo")
        metadata = (("authorization", f"Bearer {TOKENS['bob']}"),)
        assert b"lively" in call(b"", metadata=metadata, timeout=20)
