"""How many streams of vLLM change when they are computed in another batch, or resumed at another instance.

    python -m benchmarks.vllm_streams [--vllm-python .venv-vllm/bin/python] [--dtype bfloat16] [--streams 60]

Each stream is computed alone, then with all the others, then resumed alone after a random number of its tokens, which
vLLM computes as part of a prompt in chunks of 64 tokens; half of them greedy, half with seeds. Prints for each way how
many differ from the stream alone, and after how many tokens. No prefix is cached.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
import msgspec

from benchmarks.peers import vllm_python_option
from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineRequest, TokensEvent
from engine.sampling.params import SamplingParams
from tandem.demo import MODEL_DIR

NUM_TOKENS = 64
_LENGTHS = (20, 60, 150, 400)


@click.command(help=__doc__)
@vllm_python_option
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--streams", "num_streams", default=60, show_default=True)
def main(vllm_python: Path, dtype: Literal["float32", "bfloat16"], num_streams: int) -> None:
    config = EngineConfig(
        kind="vllm",
        python=str(vllm_python),
        model=str(MODEL_DIR),
        dtype=dtype,
        num_blocks=400,
        block_size=32,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_threads=1,
        enable_prefix_caching=False,
    )
    asyncio.run(compare(config, num_streams))


async def compare(config: EngineConfig, num_streams: int) -> None:
    engine = await AsyncEngine.start(config)
    rng = random.Random(0)
    asked = [request(rng, number, engine.info.vocab_size) for number in range(num_streams)]
    alone = [await tokens(engine, one) for one in asked]
    together = await asyncio.gather(*(tokens(engine, renamed(one, "together")) for one in asked))
    resumed = []
    for one, answer in zip(asked, alone, strict=True):
        emitted = answer[: rng.randrange(1, NUM_TOKENS)]
        rest = await tokens(engine, renamed(one, "resumed", output_token_ids=emitted))
        resumed.append([*emitted, *rest])
    await engine.shutdown()
    show("with the others", alone, together)
    show("resumed", alone, resumed)


def request(rng: random.Random, number: int, vocab_size: int) -> EngineRequest:
    prompt = [rng.randrange(3, vocab_size) for _ in range(_LENGTHS[number % len(_LENGTHS)])]
    params = SamplingParams(temperature=0.9 if number % 2 else 0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return EngineRequest(request_id=f"{number}", prompt_token_ids=prompt, params=params, seed=number)


def renamed(asked: EngineRequest, way: str, **fields: list[int]) -> EngineRequest:
    return msgspec.structs.replace(asked, request_id=f"{way} {asked.request_id}", **fields)


async def tokens(engine: AsyncEngine, asked: EngineRequest) -> list[int]:
    found = [event async for event in engine.add_request(asked) if isinstance(event, TokensEvent)]
    assert found[-1].error is None, found[-1]
    return [token_id for event in found for token_id in event.token_ids]


def show(way: str, alone: Sequence[list[int]], others: Sequence[list[int]]) -> None:
    firsts = [
        next(index for index, (mine, other) in enumerate(zip(one, another, strict=True)) if mine != other)
        for one, another in zip(alone, others, strict=True)
        if one != another
    ]
    click.echo(f"{way}: {len(firsts)} of {len(alone)} streams differ, the first time after {sorted(firsts)} tokens")


if __name__ == "__main__":
    main()
