"""A page that is damaged, short, swapped or gone costs a recompute, never a token.

The prefill instance has written its pages when its first token is out; the decode instance is held before it reads the
first one. In between the test does to the files what disks, other programs and attackers do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem import Client
from tests.e2e.asking import Asked
from tests.faults.checker import assert_no_leak, assert_same_answer, assert_usage, footprint
from tests.faults.reference import Reference
from tests.faults.rig import Rig
from tests.files_below import files_below
from tests.lively import BLOCK_SIZE, random_prompt

SAMPLING = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
LENGTH = 10 * BLOCK_SIZE + 5


def flip_a_bit(pages: list[Path], source: random.Random) -> None:
    """One bit of the payload of one page."""
    page = source.choice(pages)
    content = bytearray(page.read_bytes())
    content[source.randrange(300, len(content))] ^= 1 << source.randrange(8)
    page.write_bytes(content)


def flip_a_header_bit(pages: list[Path], source: random.Random) -> None:
    page = source.choice(pages)
    content = bytearray(page.read_bytes())
    content[source.randrange(0, 212)] ^= 1 << source.randrange(8)
    page.write_bytes(content)


def truncate(pages: list[Path], source: random.Random) -> None:
    page = source.choice(pages)
    page.write_bytes(page.read_bytes()[: source.choice([0, 100, 256, 1000])])


def swap(pages: list[Path], source: random.Random) -> None:
    """Two good pages, each under the other's name."""
    first, second = source.sample([page for page in pages if "transfers" not in page.parts], 2)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def remove(pages: list[Path], source: random.Random) -> None:
    source.choice(pages).unlink()


def remove_all(pages: list[Path], source: random.Random) -> None:
    for page in pages:
        page.unlink()


def wait_for_pages(store: Path, old: set[Path], count: int) -> list[Path]:
    """The pages that have come since `old`, once there are `count`: the last ones are saved after the first token is
    out."""
    deadline_s = time.monotonic() + 5.0
    while True:
        pages = [path for path in set(files_below(store)) - old if not path.name.startswith(".")]
        if len(pages) == count:
            return pages
        assert time.monotonic() < deadline_s, f"{len(pages)} of {count} pages are in the store"
        time.sleep(0.01)


@pytest.mark.parametrize("damage", [flip_a_bit, flip_a_header_bit, truncate, swap, remove, remove_all])
def test_damage_costs_a_recompute_and_never_a_token(
    rig: Rig,
    reference: Reference,
    prompts: random.Random,
    damage: Callable[[list[Path], random.Random], None],
) -> None:
    prompt = random_prompt(prompts, LENGTH)
    store = rig.stack.store_folder
    before, old = footprint(rig), set(files_below(store))
    load_before = rig.load("decode-0")
    with rig.armed("decode-0", "kv.load") as loading:
        asked = Asked(rig.address, prompt, **SAMPLING)
        loading.wait()
        asked.wait_first_token()
        pages = wait_for_pages(store, old, LENGTH // BLOCK_SIZE + 1)
        damage(sorted(pages), prompts)
    completion = asked.completion()
    assert_same_answer(completion, reference.answer(prompt, **SAMPLING))
    assert_usage(completion)
    assert completion.usage.recomputed_tokens > 0
    load_after = rig.load("decode-0")
    assert load_after.num_recomputed_blocks > load_before.num_recomputed_blocks
    assert_no_leak(before, rig)
    # The store heals: the same prompt again is served, from wherever, with the same tokens.
    with Client(rig.address) as client:
        assert_same_answer(client.generate(prompt, **SAMPLING), reference.answer(prompt, **SAMPLING))  # type: ignore[arg-type]
