"""What `tandem bench latency` and `throughput` share: the engine's options, and the engine that is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tandem.models import ModelNotFound, resolve

if TYPE_CHECKING:
    from engine import LLM

C = TypeVar("C", bound=Callable[..., Any])
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the engine is told, by the names of the command line."""

    model: str
    load_format: str
    dtype: str
    device: str
    threads: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_memory: float | None

    def make(self) -> LLM:
        """The engine, without its tokenizer; raises ClickException that says what to type."""
        from engine import LLM
        from engine.errors import EngineError

        try:
            return LLM(
                resolve(self.model),
                load_format=self.load_format,
                dtype=self.dtype,
                device=self.device,
                num_threads=self.threads,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                kv_cache_bytes=None if self.kv_memory is None else round(self.kv_memory * _GIB),
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            )
        except (ModelNotFound, EngineError, OSError) as error:
            raise click.ClickException(str(error)) from None


def engine_options(command: C) -> C:
    """Adds the engine's options, which the command gets as keyword arguments for EngineOptions."""
    options = [
        click.option(
            "--model",
            default="demo",
            show_default=True,
            metavar="NAME",
            help="demo, a checkpoint's folder, or owner/name on the Hugging Face hub.",
        ),
        click.option(
            "--load-format",
            type=click.Choice(["auto", "dummy"]),
            default="auto",
            show_default=True,
            help="dummy: random weights of the shape in the folder's config.json, which is then all that is needed.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16"]),
            default="auto",
            show_default=True,
            help="Of weights and KV; auto: the checkpoint's own.",
        ),
        click.option(
            "--device",
            type=click.Choice(["cpu", "cuda"]),
            default="cpu",
            show_default=True,
            help="Where it computes.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="Threads; absent: a thread for each core."),
        click.option("--max-model-len", type=click.IntRange(min=2), help="Longest prompt + output, tokens."),
        click.option(
            "--max-num-seqs",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="Requests in one step at the most.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=click.IntRange(min=1),
            default=512,
            show_default=True,
            help="Tokens in one step at the most: the chunk of chunked prefill.",
        ),
        click.option(
            "--kv-memory",
            type=click.FloatRange(min=0, min_open=True),
            metavar="GIB",
            help="KV memory; absent: a part of what is free.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the prompts."),
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            help="Also write every figure there, with the options and the machine.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def write_json(path: Path, options: EngineOptions, workload: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Writes `figures` with what they are of, and says so."""
    from tandem.serve_bench.results import machine, versions

    made_on = {"options": asdict(options), "workload": workload, "versions": versions(), "machine": machine()}
    path.write_text(json.dumps({**made_on, **figures}, indent=2) + "\n")
    click.echo(f"written: {path}")
