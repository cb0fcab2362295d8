"""One side of `engine_vs_vllm`: loads a shape with random weights and times the works that stdin asks for.

    python offline_peer.py '{"engine": "tandem", "model": FOLDER, "max_model_len": 4096, "threads": 2}'

Of the engine `tandem` or `vllm`; with `"cached": true` it has prefix caches, and with `"adapters": [FOLDER, …]` the
requests have these LoRA adapters by turns. Prints `ready`, then reads one JSON object a line (`num_requests`,
`input_len`, `output_len`, `seed`) and prints `seconds S` for each. It needs nothing of Tandem but what `tandem` names,
so that it runs in vLLM's environment too.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

_KV_BYTES = 3 << 30
RANK = 16
"""Of all adapters (benchmarks/adapters.py)."""
Generate = Callable[[list[list[int]], int], Any]


def main(options: dict[str, Any]) -> None:
    adapters = {str(index): folder for index, folder in enumerate(options.get("adapters", ()))}
    generate = (_tandem if options["engine"] == "tandem" else _vllm)(options, adapters)
    print("ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        draw = random.Random(work["seed"])
        prompts = [[draw.randrange(3, 8000) for _ in range(work["input_len"])] for _ in range(work["num_requests"])]
        started = time.perf_counter()
        generate(prompts, work["output_len"])
        print(f"seconds {time.perf_counter() - started}", flush=True)


def _tandem(options: dict[str, Any], adapters: dict[str, str]) -> Generate:
    from engine import LLM, SamplingParams

    llm = LLM(
        options["model"],
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        num_threads=options["threads"],
        kv_cache_bytes=_KV_BYTES,
        max_model_len=options["max_model_len"],
        enable_prefix_caching=options.get("cached", False),
        lora_adapters=adapters,
    )
    return lambda prompts, length: llm.generate(
        prompts,
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
        use_tqdm=False,
        lora=_by_turns([*adapters] or [""], len(prompts)),
    )


def _vllm(options: dict[str, Any], adapters: dict[str, str]) -> Generate:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK} if adapters else {}
    llm = LLM(
        options["model"],
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        enable_prefix_caching=options.get("cached", False),
        enforce_eager=True,
        **lora,
    )
    requests = [LoRARequest(name, number, folder) for number, (name, folder) in enumerate(adapters.items(), 1)]
    return lambda prompts, length: llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False),
        use_tqdm=False,
        lora_request=_by_turns(requests, len(prompts)) if requests else None,
    )


def _by_turns(items: list[Any], num_requests: int) -> list[Any]:
    return [items[index % len(items)] for index in range(num_requests)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
