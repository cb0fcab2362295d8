"""Results of the engine, recorded for one COMPUTATION_VERSION: a change that gives others must raise it.

A result here is no proof that it is right (test_exactness.py is); it is one that KV in stores depends on. The ids are
sampled in float32 from distributions that vary, so rounding, which differs between processors, does not change them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine import LLM, SamplingParams
from engine.identity import COMPUTATION_VERSION
from tests.builders import lively_checkpoint
from tests.oracle import random_prompts

RECORDED_VERSION = 2
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, seed=7, presence_penalty=0.3, max_tokens=16, ignore_eos=True
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
WEIGHTS = {
    "llama": "015789adfa51cc90",
    "qwen2": "24808f728326dc39",
    "qwen3": "8601778198d923ac",
    "qwen3_moe": "c31935e414aed1e0",
    "mistral": "c841021382cbd59d",
    "mixtral": "93f817ae130a721e",
    "gpt_oss": "611c1e45447e1f55",
    "gemma2": "3d0706f2ffedc7dc",
}
"""Digests of the checkpoints that the results are of."""
RESULTS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "llama": ("llama", {}, [646, 184, 1002, 623, 366, 980, 809, 900, 567, 514, 357, 931, 949, 400, 627, 970]),
    "qwen2": ("qwen2", {}, [731, 147, 803, 811, 58, 1022, 559, 840, 694, 565, 45, 937, 956, 267, 85, 922]),
    "qwen3": ("qwen3", {}, [656, 955, 891, 669, 779, 53, 658, 702, 499, 667, 192, 611, 557, 185, 375, 972]),
    "qwen3_moe": ("qwen3_moe", {}, [820, 428, 807, 426, 304, 881, 635, 730, 643, 267, 6, 907, 737, 464, 546, 923]),
    "mistral": ("mistral", {}, [630, 502, 946, 786, 237, 981, 584, 520, 669, 346, 5, 840, 1019, 124, 842, 863]),
    "mixtral": ("mixtral", {}, [759, 290, 746, 516, 338, 915, 639, 793, 601, 632, 2, 1001, 850, 149, 558, 998]),
    "rope of yarn": (
        "llama",
        {"rope_parameters": YARN},
        [914, 449, 819, 677, 201, 947, 670, 521, 636, 399, 15, 997, 793, 441, 401, 1010],
    ),
    "linear rope": (
        "llama",
        {"rope_parameters": LINEAR},
        [838, 473, 755, 703, 265, 981, 675, 899, 370, 471, 6, 877, 763, 290, 729, 930],
    ),
    "gpt_oss": ("gpt_oss", {}, [916, 426, 797, 641, 28, 780, 720, 831, 753, 393, 66, 960, 459, 190, 498, 758]),
    "gemma2": ("gemma2", {}, [558, 631, 907, 875, 296, 998, 737, 446, 471, 563, 23, 163, 845, 508, 322, 976]),
}


def weights_digest(folder: Path) -> str:
    """Of names, shapes, and which of a tensor's first 16 numbers exceed its mean: rounding does not change it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        exceeds = (tensor.flatten()[:16] > tensor.mean()).tolist()
        digest.update(f"{name} {list(tensor.shape)} {exceeds}\n".encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_change_have_another_computation_version(name: str, tmp_path: Path) -> None:
    architecture, overrides, expected = RESULTS[name]
    folder = lively_checkpoint(tmp_path, architecture, **overrides)
    assert (weights := weights_digest(folder)) == WEIGHTS[architecture], (
        f"tests/builders.py writes another checkpoint, {weights}: transformers or torch has changed. Record its digest "
        "and the results here, in a commit that leaves the engine and COMPUTATION_VERSION as they are"
    )
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=64)
    _, prompt = random_prompts(2, longest=100, vocab_size=1024, seed=3)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], SAMPLED, use_tqdm=False)
    found = list(answer.outputs[0].token_ids)
    assert (COMPUTATION_VERSION, found) == (RECORDED_VERSION, expected), (
        f"recorded for version {RECORDED_VERSION}: {expected}; version {COMPUTATION_VERSION} computes {found}. Raise "
        "COMPUTATION_VERSION, so that no instance reads KV of the earlier version, and record the results here"
    )
