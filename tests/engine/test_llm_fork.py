"""An `LLM` belongs to the process that made it: a fork gets errors, and never waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import lively_checkpoint

ROOT = Path(__file__).parents[2]
_HEAD = """
import faulthandler, os, sys
from engine import LLM, SamplingParams
from engine.errors import EngineError

FOLDER, NUM_THREADS = sys.argv[1], int(sys.argv[2])

def make():
    return LLM(FOLDER, num_gpu_blocks_override=64, num_threads=NUM_THREADS, skip_tokenizer_init=True)

def ids(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4)
    return llm.generate([[number, 5, 6] for number in range(3)], params, use_tqdm=False)[0].outputs[0].token_ids

def attempt(act):
    try:
        print(act() == EXPECTED, flush=True)
    except EngineError as error:
        print(error, flush=True)

made = make()
EXPECTED = ids(made)
if os.fork():
    os.wait()
    attempt(lambda: ids(made))
else:
    faulthandler.dump_traceback_later(60, exit=True)
    attempt(lambda: ids(made))
    attempt(lambda: ids(make()))
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("num_threads", "of_a_new_one"), [(1, "True"), (2, "process .* has used an LLM, .* by spawn .*")]
)
def test_a_fork_gets_an_error_and_the_parent_goes_on(tmp_path: Path, num_threads: int, of_a_new_one: str) -> None:
    command = [sys.executable, "-c", _HEAD, str(lively_checkpoint(tmp_path)), str(num_threads)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=100
    )
    assert "Timeout" not in done.stderr, done.stderr
    [inherited, new, of_parent] = done.stdout.splitlines()
    assert "the LLM belongs to process" in inherited
    assert "start the process by spawn" in inherited
    assert of_parent == "True"
    assert re.fullmatch(of_a_new_one, new)
