"""Speed of requests with LoRA adapters beside those without, of one engine, in turns in one run.

    python -m benchmarks.adapters [--shape 33m] [--rank 16] [--adapters 1 --adapters 32] [--repeat 3]

Random weights of one shape, adapters of all linear layers, bfloat16, greedy, forced length. The requests of a batch
have so many different adapters, by turns. Ratios below 1: slower than without an adapter.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from functools import partial
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from benchmarks.engine_vs_transformers import WORKS, Work, timed
from benchmarks.shapes import SHAPES, write_config
from engine import LLM, SamplingParams


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(["33m", "0.6b"]), default="33m", show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--adapters", "counts", multiple=True, default=[1, 4, 32], show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Runs of each; the median counts.")
@click.option("--threads", default=2, show_default=True)
def main(shape: str, rank: int, counts: tuple[int, ...], repeat: int, threads: int) -> None:
    kinds = (0, *counts)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "model", shape)
        adapters = {f"a{index}": write_adapter(Path(folder) / f"a{index}", shape, rank) for index in range(max(counts))}
        llm = LLM(
            model,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            num_threads=threads,
            kv_cache_bytes=1 << 30,
            enable_prefix_caching=False,
            lora_adapters=adapters,
        )
    click.echo(f"{shape}, rank {rank}, bfloat16, {threads} threads\n{'work':12} " + " ".join(f"{k:>16}" for k in kinds))
    for work in (*WORKS, Work(1, 1024, 1)):
        seconds: dict[int, list[float]] = {kind: [] for kind in kinds}
        for _ in range(repeat + 1):
            for num_adapters in kinds:
                names = [f"a{index % num_adapters}" if num_adapters else "" for index in range(work.num_requests)]
                seconds[num_adapters].append(timed(partial(generate, llm, work, names)))
        medians = [statistics.median(times[1:]) for times in seconds.values()]  # the first is a warm-up
        num_tokens = work.num_requests * (work.output_len if work.output_len > 1 else work.input_len)
        shown = [f"{num_tokens / median:8.1f} ({medians[0] / median:5.2f})" for median in medians]
        click.echo(f"{work!s:12} " + " ".join(f"{one:>16}" for one in shown) + "  tok/s")


def generate(llm: LLM, work: Work, names: list[str]) -> None:
    prompts = torch.randint(3, 8000, (work.num_requests, work.input_len)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False, lora=names)


def write_adapter(folder: Path, shape: str, rank: int) -> Path:
    """Random numbers for every linear layer of the shape, in PEFT's form."""
    sizes, tensors = SHAPES[shape], {}
    hidden, features, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, key = sizes["num_attention_heads"] * heads, sizes["num_key_value_heads"] * heads
    projections = {
        **{"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden)},
        **{"self_attn.o_proj": (hidden, query), "mlp.gate_proj": (features, hidden), "mlp.up_proj": (features, hidden)},
        "mlp.down_proj": (hidden, features),
    }
    for layer in range(sizes["num_hidden_layers"]):
        for name, (outputs, inputs) in projections.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, inputs) * inputs**-0.5).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.1).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in projections]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()
