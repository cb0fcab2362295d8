"""One side of `engine_vs_vllm`: loads a shape with random weights and times the works that stdin asks for.

    python offline_peer.py tandem|vllm FOLDER MAX_MODEL_LEN THREADS [cached]

Prints `ready`, then reads one JSON object a line (`num_requests`, `input_len`, `output_len`, `seed`) and prints
`seconds S` for each. `cached`: with prefix caches. It needs nothing of Tandem but what `tandem` names, so that it runs
in vLLM's environment too.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

_KV_BYTES = 3 << 30
Generate = Callable[[list[list[int]], int], Any]


def main(engine: str, folder: str, max_model_len: int, threads: int, *, is_cached: bool) -> None:
    make = _tandem if engine == "tandem" else _vllm
    generate = make(folder, max_model_len, threads, is_cached)
    print("ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        draw = random.Random(work["seed"])
        prompts = [[draw.randrange(3, 8000) for _ in range(work["input_len"])] for _ in range(work["num_requests"])]
        started = time.perf_counter()
        generate(prompts, work["output_len"])
        print(f"seconds {time.perf_counter() - started}", flush=True)


def _tandem(folder: str, max_model_len: int, threads: int, is_cached: bool) -> Generate:
    from engine import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        num_threads=threads,
        kv_cache_bytes=_KV_BYTES,
        max_model_len=max_model_len,
        enable_prefix_caching=is_cached,
    )
    return lambda prompts, length: llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True), use_tqdm=False
    )


def _vllm(folder: str, max_model_len: int, threads: int, is_cached: bool) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        enable_prefix_caching=is_cached,
        enforce_eager=True,
    )
    return lambda prompts, length: llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), is_cached="cached" in sys.argv[5:])
