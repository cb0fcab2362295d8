"""`tandem up` apart from its processes: what it prints, what it reads, and what it rejects before anything starts."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from router.request.validation import ServedModel
from tandem.client.credentials import PLAINTEXT, Credentials
from tandem.commands import up
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import running

TOKEN = "a" * 32


@pytest.mark.parametrize("reason", ["no bearer token", "this model has no tokenizer", ""])
async def test_a_try_out_that_fails_says_why_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    folder, tokens = write_model_folder(tmp_path / "model"), tmp_path / "tokens"
    tokens.write_text(f"client: {hashlib.sha256(TOKEN.encode()).hexdigest()}")
    if "tokenizer" in reason:
        (folder / "tokenizer.json").unlink()
    credentials = PLAINTEXT if "bearer" in reason else Credentials(token=TOKEN)
    async with running(ServedModel.from_folder(folder), folder, auth={"tokens_file": str(tokens)}) as rig:
        await asyncio.to_thread(up._show_first_text, rig.app.address, credentials)
    shown = capsys.readouterr().out
    assert reason in shown
    assert ("(no example text: " in shown) == bool(reason)
    assert ("Once upon a time" in shown) == (not reason)
