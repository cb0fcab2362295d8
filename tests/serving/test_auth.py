"""Bearer tokens: which calls are admitted, for which tenant, and what an error does not reveal."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.auth import BearerTokens, certificate_authorizer
from serving.errors import PermissionDenied, Unauthenticated
from serving.settings import SettingsError
from tests.certificates import replace

ALICE, OLD, BOB = "alices-token", "alices-old-token", "bobs-token"


def line(tenant: str, token: str) -> str:
    return f"{tenant}: {hashlib.sha256(token.encode()).hexdigest()}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# clients\n\n{line('alice', ALICE)}{line('alice', OLD)}{line('bob', BOB)}")
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "x"), ("authorization", f"Bearer {token}"))


def test_a_token_stands_for_its_tenant_and_a_tenant_may_have_several(path: Path) -> None:
    tokens = BearerTokens(path, "auth.tokens_file")
    assert tokens.tenant_of(bearer(ALICE)) == tokens.tenant_of(bearer(OLD)) == "alice"
    assert tokens.tenant_of((("authorization", f"bearer  {BOB}"),)) == "bob"


@pytest.mark.parametrize(
    "metadata",
    [
        bearer("unknown"),
        bearer(""),
        bearer(ALICE + " "),
        bearer(hashlib.sha256(ALICE.encode()).hexdigest()),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", b"Bearer \xff"),),
        (*bearer(ALICE), *bearer(BOB)),
    ],
)
def test_every_wrong_one_is_refused_in_the_same_words(
    path: Path, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    with pytest.raises(Unauthenticated, match=r"^unknown bearer token: send"):
        BearerTokens(path, "auth.tokens_file").tenant_of(metadata)


@pytest.mark.parametrize("metadata", [None, (), (("authorization-bin", b"Bearer"),)])
def test_a_missing_one_is_asked_for(path: Path, metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
    with pytest.raises(Unauthenticated, match=r"^no bearer token: send `authorization: Bearer <token>`"):
        BearerTokens(path, "auth.tokens_file").tenant_of(metadata)


def test_digests_are_compared_to_their_ends_and_may_name_their_algorithm(path: Path) -> None:
    digest = hashlib.sha256(ALICE.encode()).hexdigest()
    path.write_text(f"alice: sha256:{digest.upper()}\n")
    assert BearerTokens(path, "auth.tokens_file").tenant_of(bearer(ALICE)) == "alice"
    path.write_text(f"alice: {digest[:-1]}{'1' if digest.endswith('0') else '0'}\n")
    with pytest.raises(Unauthenticated):
        BearerTokens(path, "auth.tokens_file").tenant_of(bearer(ALICE))


def test_the_digest_of_nothing_admits_no_call_without_a_token(path: Path) -> None:
    path.write_text(line("alice", ""))
    for value in ("", "Bearer", "Bearer ", "Basic x"):
        with pytest.raises(Unauthenticated):
            BearerTokens(path, "auth.tokens_file").tenant_of((("authorization", value),))


@pytest.mark.parametrize("kind", ["x509_common_name", "x509_subject_alternative_name"])
def test_a_certificate_may_carry_an_allowed_name_of_either_kind(kind: str) -> None:
    def context(*names: bytes) -> Any:
        return SimpleNamespace(auth_context=lambda: {kind: names, "x509_pem_cert": [b"router"]})

    authorize = certificate_authorizer(("router", "10.0.0.7"))
    authorize(context(b"other", b"router"))
    for names in ((), (b"other",), (b"router2",), (b"\xff",)):
        with pytest.raises(PermissionDenied):
            authorize(context(*names))


def test_tokens_come_and_go_with_the_file_and_a_bad_file_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = BearerTokens(path, "auth.tokens_file")
    replace(path, line("alice", ALICE).encode())
    assert tokens.tenant_of(bearer(ALICE)) == "alice"
    with pytest.raises(Unauthenticated):
        tokens.tenant_of(bearer(OLD))
    for bad in (b"", line("bob", BOB).encode()[:-9], b"bob: " + BOB.encode(), b"\xff\xfe"):
        replace(path, bad)
        assert tokens.tenant_of(bearer(ALICE)) == "alice"
    assert "is not `tenant: sha256 of a token`" in caplog.text
    assert BOB not in caplog.text, "a line that should have been a digest may be a token"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f"alice: {ALICE}\n", "line 1 is not `tenant: sha256 of a token`"),
        (f"al ice: {'0' * 64}\n", "line 1 is not"),
        (line("alice", ALICE) + line("bob", ALICE), "line 2 assigns a token to a second tenant"),
        ("# empty\n", "has no tokens"),
    ],
)
def test_a_file_that_cannot_be_used_names_setting_and_line(path: Path, content: str, problem: str) -> None:
    path.write_text(content)
    with pytest.raises(SettingsError, match=rf"^auth\.tokens_file: .*{problem}") as caught:
        BearerTokens(path, "auth.tokens_file")
    assert ALICE not in str(caught.value)
