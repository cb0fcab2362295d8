"""Offline generation with vLLM's argument names: `LLM(model=…).generate(prompts, SamplingParams(…))`.

The engine core runs in this process and thread; this is also the aggregated oracle that the tests compare everything
with.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from engine.bad_words import with_bad_word_ids
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError, InvalidRequest, shown
from engine.generation_config import GenerationDefaults
from engine.messages import AbortRequests, AddRequest, EngineRequest, FinishReason, TokenLogprob, TokensEvent
from engine.outputs import CompletionOutput, Logprob, RequestOutput
from engine.sampling_params import SamplingParams, validate, validate_prompt
from engine.stop import OutputProcessor
from engine.threads import set_num_threads
from engine.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]


class LLM:
    """A model, ready to generate. Not thread-safe."""

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        skip_tokenizer_init: bool = False,
        num_threads: int | None = None,
        **engine_options: Any,
    ) -> None:
        """`num_gpu_blocks_override` is the number of KV blocks on any device. `engine_options` are further fields of
        `EngineConfig` (device, seed, load_format, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, …)."""
        fields = {
            "model": str(model),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "num_blocks": num_gpu_blocks_override,
            **engine_options,
        }
        unknown = set(fields) - set(EngineConfig.__struct_fields__)
        if unknown:
            raise TypeError(
                f"LLM got unknown arguments {sorted(unknown)}; known: {sorted(EngineConfig.__struct_fields__)}"
            )
        if not (Path(model) / "config.json").is_file():
            raise EngineError(f"model: {shown(str(model))} has no config.json; LLM takes a checkpoint's folder")
        config = msgspec.convert(fields, EngineConfig)
        set_num_threads(num_threads)
        self.core = EngineCore(config, wake=lambda: None)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.from_folder(config.model)
        self._defaults = GenerationDefaults.from_folder(config.model, self.tokenizer)
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for; vLLM's defaults elsewhere."""
        return msgspec.convert(self._defaults.sampling_fields(), SamplingParams)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt: text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or a list of ids. Results are
        in the prompts' order. Raises InvalidRequest before anything runs if one of them cannot be served."""
        listed = _as_list(prompts)
        if isinstance(sampling_params, Sequence) and len(sampling_params) != len(listed):
            problem = f"{len(sampling_params)} given for {len(listed)} prompts"
            raise InvalidRequest("sampling_params", problem, "one for each prompt, or one for all")
        default = sampling_params if isinstance(sampling_params, SamplingParams) else self.get_default_sampling_params()
        each = sampling_params if isinstance(sampling_params, Sequence) else [default] * len(listed)
        run = _Run(self.core, use_tqdm=use_tqdm, total=len(listed))
        answers = [self._add(run, prompt, params) for prompt, params in zip(listed, each, strict=True)]
        run.finish()
        return answers

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, with the model's chat template."""
        if self.tokenizer is None:
            raise InvalidRequest("messages", "a chat needs the tokenizer, which skip_tokenizer_init left out")
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        prompts = [{"prompt_token_ids": self.tokenizer.encode_chat(each)} for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _add(self, run: _Run, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Validate one prompt and queue its choices."""
        info = self.core.info
        text, token_ids = self._tokens(prompt)
        validate_prompt(token_ids, info.vocab_size, info.max_model_len)
        if self.tokenizer is not None:
            params = with_bad_word_ids(params, partial(self.tokenizer.encode, add_special_tokens=False))
        eos_token_ids = self._defaults.eos_ids_within(info.vocab_size)
        params = validate(
            params,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_prompt_tokens=len(token_ids),
            eos_token_ids=eos_token_ids,
        )
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop", "stop strings need the tokenizer, which skip_tokenizer_init left out")
        answer = RequestOutput(f"offline-{next(self._ids)}", text, token_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        choices = []
        for index in range(params.n):
            answer.outputs.append(_empty_output(index, params))
            processor = None if self.tokenizer is None else OutputProcessor(self.tokenizer, params, prompt=token_ids)
            request = EngineRequest(
                request_id=f"{answer.request_id}-{index}",
                prompt_token_ids=token_ids,
                params=params,
                eos_token_ids=eos_token_ids,
                seed=seed,
                choice=index,
            )
            choices.append(_Choice(request, answer.outputs[index], answer, processor, self.tokenizer))
        run.add(choices)
        return answer

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping):
            if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise InvalidRequest(
                    "prompt", f"has keys {shown(sorted(prompt))}", 'exactly one of "prompt" and "prompt_token_ids"'
                )
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        if not isinstance(prompt, str):
            return None, [*prompt]
        if self.tokenizer is None:
            raise InvalidRequest(
                "prompt", "a text prompt needs the tokenizer, which skip_tokenizer_init left out", "token ids"
            )
        return prompt, self.tokenizer.encode(prompt)


@dataclass(slots=True)
class _Choice:
    """One choice that is being generated."""

    request: EngineRequest
    output: CompletionOutput
    answer: RequestOutput
    text: OutputProcessor | None
    tokenizer: Tokenizer | None
    sisters: list[_Choice] = field(default_factory=list)
    """Start once this one's first token shows that the prompt's blocks can be shared."""

    def add_logprobs(self, positions: Sequence[Sequence[TokenLogprob]]) -> None:
        """Take those of the next tokens; no positions where none were asked for."""
        if self.output.logprobs is None or self.output.cumulative_logprob is None:
            return
        for entries in positions:
            self.output.cumulative_logprob += entries[0].logprob
            self.output.logprobs.append(self._named(entries))

    def add_prompt_logprobs(self, positions: Sequence[Sequence[TokenLogprob]]) -> None:
        """Take those of the prompt, which come once."""
        if positions:
            self.answer.prompt_logprobs = [self._named(entries) if entries else None for entries in positions]

    def _named(self, entries: Sequence[TokenLogprob]) -> dict[int, Logprob]:
        return {entry.token_id: Logprob(entry.logprob, entry.rank, self._spelt(entry.token_id)) for entry in entries}

    def _spelt(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)


class _Run:
    """One call of `generate`: steps the core until every choice is finished, or aborts them all."""

    def __init__(self, core: EngineCore, *, use_tqdm: bool, total: int) -> None:
        self._core = core
        self._running: dict[str, _Choice] = {}
        self._progress = tqdm(total=total, desc="Generating", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        self._num_tokens = 0
        self._unfinished: Counter[str] = Counter()
        self._queued: list[_Choice] = []

    def add(self, choices: list[_Choice]) -> None:
        """Queue one prompt's choices; nothing runs before `finish`."""
        choices[0].sisters = choices[1:]
        self._unfinished[choices[0].answer.request_id] = len(choices)
        self._queued.append(choices[0])

    def finish(self) -> None:
        """Run to the end. Whatever ends it early, nothing stays in the core."""
        try:
            self._start(self._queued)
            while self._running:
                for event in self._core.step():
                    if isinstance(event, TokensEvent) and event.request_id in self._running:
                        self._apply(event)
        finally:
            self._core.handle(AbortRequests(list(self._running)))
            self._core.step()
            self._progress.close()

    def _start(self, choices: list[_Choice]) -> None:
        for choice in choices:
            self._running[choice.request.request_id] = choice
            self._core.handle(AddRequest(choice.request))

    def _apply(self, event: TokensEvent) -> None:
        choice = self._running[event.request_id]
        if event.finish_reason == "error":
            raise EngineError(f"{event.request_id}: {event.error}")
        output = choice.output
        finish_reason: FinishReason | None = event.finish_reason
        stop_reason: int | str | None = event.stop_token_id
        num_tokens = len(event.token_ids)
        if choice.text is not None:
            delta = choice.text.push(event.token_ids, finish_reason=finish_reason, stop_token_id=event.stop_token_id)
            output.text += delta.text
            num_tokens, finish_reason, stop_reason = delta.num_tokens, delta.finish_reason, delta.stop_reason
        output.token_ids += event.token_ids[:num_tokens]
        choice.add_logprobs(event.logprobs[:num_tokens])
        choice.add_prompt_logprobs(event.prompt_logprobs)
        choice.answer.num_cached_tokens = max(choice.answer.num_cached_tokens, event.num_cached_tokens)
        self._start(choice.sisters)
        choice.sisters = []
        self._show(num_tokens)
        if finish_reason is not None:
            output.finish_reason, output.stop_reason = finish_reason, stop_reason
            self._end(choice, aborts=event.finish_reason is None)

    def _end(self, choice: _Choice, *, aborts: bool) -> None:
        del self._running[choice.request.request_id]
        if aborts:
            self._core.handle(AbortRequests([choice.request.request_id]))
        self._unfinished[choice.answer.request_id] -= 1
        if self._unfinished[choice.answer.request_id] == 0:
            choice.answer.finished = True
            self._progress.update()

    def _show(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed = self._progress.format_dict["elapsed"] if not self._progress.disable else 0.0
        if elapsed:
            self._progress.set_postfix_str(f"{self._num_tokens / elapsed:.0f} tok/s", refresh=False)


def _empty_output(index: int, params: SamplingParams) -> CompletionOutput:
    if params.logprobs is None:
        return CompletionOutput(index, "", [])
    return CompletionOutput(index, "", [], cumulative_logprob=0.0, logprobs=[])


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
