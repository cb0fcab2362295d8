"""Tandem inside of vLLM's workers: its sampling, as one of the logits processors of the V1 model runner, and answers to
the host.

Every token is sampled by engine/sampling/sampler.py, as in the built-in engine: a pure function of the logits, of
(seed, choice, position) and of the request's tokens. vLLM then takes the best token of a row, which is the sampled one,
because its logit is infinite. A stream that another instance began therefore continues exactly, with penalties, seeds
and grammars, although vLLM counts the emitted tokens as prompt.

    added to the batch ─▶ row (its request and vLLM's growing list of its output) ⇄ moved ─▶ removed
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from engine import failpoints
from engine.sampling import sampler
from engine.sampling.grammar_masks import warm_up_masks
from engine.sampling.sampler_kernels import sample_address
from engine.scheduling.request import Request
from vllm_engine.adapters import add_adapter
from vllm_engine.failures import FOLDER, FailureLog
from vllm_engine.grammars import State, worker_grammars
from vllm_engine.kv_messages import KVSetup
from vllm_engine.kv_worker import distinct
from vllm_engine.requests import read_sampled_request

if TYPE_CHECKING:
    from vllm_engine.connector import VllmKVConnector


@dataclass(slots=True)
class _Row:
    request: Request
    output: list[int]
    """Owned by vLLM, which appends each token."""
    num_taken: int = 0

    def update(self) -> Request:
        self.request.token_ids += self.output[self.num_taken :]
        self.num_taken = len(self.output)
        return self.request


class PositionSampling(LogitsProcessor):
    """Samples the tokens of all requests in vLLM's batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del is_pin_memory
        if device.type == "cpu":
            sample_address()  # compiled here, not in a step
        model = vllm_config.model_config
        self._sampler = sampler.TokenSampler()
        self._grammars = worker_grammars(Path(model.model), model.get_vocab_size())
        self._failures = FailureLog(Path(os.environ[FOLDER]))
        self._rows: dict[int, _Row] = {}
        self._is_warm = False

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`: [requests in the batch, vocab], float32."""
        failpoints.hit("engine.step")
        rows = [row for row in sorted(self._rows) if row < len(logits)]
        if not rows:
            return logits
        if not self._is_warm:  # in the host's warm-up, whose logits are those of all requests
            warm_up_masks(logits)
            self._is_warm = True
        requests = [self._rows[row].update() for row in rows]
        best = logits.amax(dim=-1)  # before the requests' parameters change them
        sampled = self._sampler.sample(logits if len(rows) == len(logits) else logits[rows], requests).token_ids
        for row, request in zip(rows, requests, strict=True):
            token_ids = sampled.get(request.request_id)
            if token_ids is None:
                self._failures.add(request.request_id, is_finite=math.isfinite(best[row]))
            logits[row, token_ids[0] if token_ids else 0] = math.inf
        return logits

    def _row(self, params: Any, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Row | None:
        sampled = read_sampled_request(params)
        if sampled is None or prompt_token_ids is None:
            return None  # vLLM's own, at its start
        spec = sampled.with_tokens(prompt_token_ids)
        constraint = spec.params.constraint
        grammar = None if constraint is None else self._grammars.grammar(constraint)
        spec = msgspec.structs.replace(spec, params=msgspec.structs.replace(spec.params, logprobs=None))  # vLLM's
        return _Row(Request.from_spec(spec, arrival=0, fingerprint="", grammar=grammar), output_token_ids)


class WorkerFacts:
    """Mixed into vLLM's worker class, which alone knows attention backend and KV memory as they are; called by
    `AsyncLLM.collective_rpc`."""

    model_config: Any
    model_runner: Any

    def tandem_facts(self) -> dict[str, Any]:
        """Plain values: it travels by vLLM's message pack."""
        runner = self.model_runner
        caches = distinct(runner.kv_caches)
        return {
            "runner": type(runner).__name__,
            "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            "kv_dtype": sorted({str(cache.dtype).removeprefix("torch.") for cache in caches}),
            "kv_shape": [list(cache.shape) for cache in caches],
            "kv_bytes": sum(math.prod(cache.shape) * cache.element_size() for cache in caches),
        }

    def tandem_add_adapter(self, name: str, number: int, folder: str) -> tuple[str, list[str]]:
        """See adapters.add_adapter."""
        return add_adapter(self.model_runner, LoRARequest(name, number, folder))

    def tandem_connect(self, setup: bytes) -> str:
        """`setup`: a KVSetup as msgpack. Returns the connector's name; raises EngineError."""
        connector = cast("VllmKVConnector", get_kv_transfer_group())
        return connector.connect(msgspec.msgpack.decode(setup, type=KVSetup))

    def tandem_begun(self) -> list[str]:
        """Ids of requests that were in a step and have not ended; some of those that just have are among them."""
        found = (read_sampled_request(state.sampling_params) for state in self.model_runner.requests.values())
        return [sampled.request.request_id for sampled in found if sampled is not None]

    def tandem_compile(self, constraints: bytes) -> list[State]:
        """See WorkerGrammars.compile."""
        model = self.model_config
        return worker_grammars(Path(model.model), model.get_vocab_size()).compile(constraints)
