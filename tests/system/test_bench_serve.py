"""`tandem bench serve` against whole stacks: prompts that begin alike, and the cached tokens that it reports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tandem.bench.serve.grpc_endpoint import GrpcEndpoint
from tandem.bench.serve.load import run_load
from tandem.bench.serve.report import summarise
from tandem.bench.serve.workload import Lengths, RandomWorkload, Schedule, Vocabulary
from tests.engine_under_test import BLOCK_SIZE
from tests.system.stacks import Stack, on

VOCABULARY = Vocabulary(tuple(range(360)), "below 360")
PREFIX_LEN = 4 * BLOCK_SIZE + 5


def num_known(earlier: Sequence[tuple[int, ...]], prompt: tuple[int, ...]) -> int:
    """Tokens in the full blocks with which `prompt` and an earlier one begin. One token at least is computed."""

    def num_common(other: tuple[int, ...]) -> int:
        return sum(itertools.takewhile(bool, (one == two for one, two in zip(other, prompt[:-1], strict=False))))

    return max(map(num_common, earlier), default=0) // BLOCK_SIZE * BLOCK_SIZE


@on("shared_storage", "nixl")
@pytest.mark.parametrize("turns", [3, pytest.param(1, marks=pytest.mark.slow)])
async def test_the_reported_cached_tokens_are_those_of_the_shared_beginnings(stack: Stack, turns: int) -> None:
    lengths = {"prompt": Lengths(20, 40), "output": Lengths(3, 3)}
    workload = RandomWorkload(
        VOCABULARY, Schedule(num_requests=9), 70 + turns, prefix_len=PREFIX_LEN, num_prefixes=2, turns=turns, **lengths
    )
    planned = list(workload.plan(1, float("inf")))
    endpoint = GrpcEndpoint(stack.rig.address)
    records = await run_load(endpoint, planned, max_concurrency=1)
    await endpoint.close()
    prompts = [one.prompt_token_ids for one in planned]
    expected = [num_known(prompts[:number], prompt) for number, prompt in enumerate(prompts)]
    assert [record.num_cached_tokens for record in records] == expected
    assert summarise(records).cached_share == pytest.approx(sum(expected) / sum(map(len, prompts)))
    assert expected.count(0) == 2, "the first prompt of each prefix"
