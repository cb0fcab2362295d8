"""Offline generation with vLLM's names: `LLM(model=…).generate(prompts, SamplingParams(…))` -> list of RequestOutput.

The engine core runs in this process and thread. Tests use it as the aggregated reference of disaggregated serving.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from engine.checkpoint import resolve, resolve_adapter
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import AbortRequests, EngineRequest, ErrorKind, TokenLogprob, TokensEvent
from engine.errors import EngineError, InvalidRequest, NotSupported, UnsupportedModel, shown
from engine.generation_config import GenerationDefaults
from engine.machine import set_num_threads
from engine.ranks import RankLost
from engine.sampling.grammar import CompiledGrammar
from engine.sampling.params import SamplingParams, validate, validate_prompt, with_bad_word_ids
from engine.text.chat_output import tool_format_of
from engine.text.chat_template import Tools, template_messages
from engine.text.detokenizer import OutputProcessor
from engine.text.tokenizer import Tokenizer, missing_tokenizer
from engine.vllm_names import engine_fields

_log = logging.getLogger(__name__)
_OFFLINE = {"max_num_batched_tokens": 2048}
"""Defaults of `EngineConfig` that differ here: no stream waits for its next token, so that long chunks cost nothing."""


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None
    """Text of this token alone; None without a tokenizer."""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """stop, length or error; None where the call was interrupted."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None for EOS."""
    error: str | None = None
    """Why `finish_reason` is error, such as parameters that leave no token, or logits of the model that are not finite.
    What came before is in the output."""
    cumulative_logprob: float | None = None
    """Sum over the output tokens; None unless `logprobs` was requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token, by token id: the token itself first, then the best ones; None unless requested."""


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache. The first output's: the others find what that one has computed."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, by token id: the token itself first, then the best ones; None for the first token, and unless
    requested."""

    def __getitem__(self, name: str) -> Any:
        """`text` and `token_ids` of the first output, as in nano-vllm's results."""
        if name not in ("text", "token_ids"):
            raise KeyError(name)
        return getattr(self.outputs[0], name)


_OF_CALL: Collection[ErrorKind | None] = ("invalid_constraint", "no_room")
"""Errors of constraints, which end the call. Any other is that of one output."""
_IDLE_S = 0.25
"""Longest pause between steps without work, for deadlines."""

Prompt = str | Mapping[str, Any] | Sequence[int]
_PROMPTS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


_FORK_REMEDY = "start the process by spawn (multiprocessing.get_context('spawn')), and make the LLM in it"
_threads_pid: int | None = None
"""The first process of this one's line of forks in which an LLM had several threads."""


def _check_threads() -> None:
    """Raises EngineError where OpenMP's threads ended at a fork: a computation would wait for them forever."""
    global _threads_pid
    if torch.get_num_threads() == 1:
        return
    _threads_pid = _threads_pid or os.getpid()
    if _threads_pid != os.getpid():
        problem = f"process {_threads_pid}, of which this one is a fork, has used an LLM, whose threads are not here"
        raise EngineError(f"{problem}: {_FORK_REMEDY}, or set num_threads=1")


class LLM:
    """A loaded model. Not thread-safe. It belongs to the process that made it, as its threads and ranks do."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        skip_tokenizer_init: bool = False,
        seed: int | None = None,
        **engine_options: Any,
    ) -> None:
        """`model` is a checkpoint's folder, owner/name on the Hugging Face hub (at `revision`: a branch, tag or
        commit), or demo. With `seed` the requests without a seed of their own draw the same in every run; it is also
        the seed of dummy weights. `engine_options` are further fields of `EngineConfig` (dtype, device, max_model_len,
        block_size, max_num_seqs, lora_adapters, …) and their names in vLLM (engine/vllm_names.py); unsupported ones
        are refused."""
        self._pid = os.getpid()
        fields = {**_OFFLINE, **engine_fields({**engine_options, "seed": seed})}
        adapters = fields.get("lora_adapters", {})
        if not isinstance(adapters, Mapping):
            raise InvalidRequest("lora_adapters", f"is {shown(adapters)}", "folders by name: {'sql': 'adapters/sql'}")
        fields["lora_adapters"] = {name: str(resolve_adapter(str(given))) for name, given in adapters.items()}
        folder = resolve(str(model), revision)
        if tokenizer is not None and resolve(str(tokenizer), revision) != folder:
            raise NotSupported("tokenizer", shown(str(tokenizer)), "None; use a model folder with its tokenizer.json")
        config = msgspec.convert({**fields, "model": str(folder)}, EngineConfig)
        if not skip_tokenizer_init and (problem := missing_tokenizer(folder)):
            raise UnsupportedModel(f"{problem}, or set skip_tokenizer_init=True for prompts of token ids")
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.from_folder(folder)
        self._defaults = GenerationDefaults.from_folder(folder, self.tokenizer, skips_tokenizer=skip_tokenizer_init)
        self._num_threads, self._num_ranks = config.num_threads, config.parallelism.num_ranks
        self._woken = threading.Event()
        with self.torch_settings():
            self.core = EngineCore(config, wake=self._woken.set)
        self._ids = itertools.count()
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    @contextlib.contextmanager
    def torch_settings(self) -> Iterator[None]:
        """Inside of the block torch has this LLM's threads (see `set_num_threads`) and makes float32 tensors on the CPU
        by default; after it, what it had before. For callers that step `core`. Raises EngineError in a fork."""
        if os.getpid() != self._pid:
            problem = f"the LLM belongs to process {self._pid}, of which this one is a fork"
            raise EngineError(f"{problem}: {_FORK_REMEDY}")
        num_before, dtype_before = torch.get_num_threads(), torch.get_default_dtype()
        # Only where it is needed: inside of it every operation of torch takes some microseconds more.
        on_cpu = torch.get_default_device().type == "cpu"
        with contextlib.nullcontext() if on_cpu else torch.device("cpu"):
            try:
                torch.set_default_dtype(torch.float32)
                set_num_threads(self._num_threads, num_processes=self._num_ranks)
                _check_threads()
                yield
            finally:
                torch.set_default_dtype(dtype_before)
                if torch.get_num_threads() != num_before:
                    torch.set_num_threads(num_before)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode`, `decode`, `apply_chat_template`. It is not transformers' class."""
        if self.tokenizer is None:
            raise InvalidRequest("skip_tokenizer_init", "is set, so there is no tokenizer", "False")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The values of the model's generation_config.json, with vLLM's defaults for the rest."""
        return msgspec.convert(self._defaults.sampling_fields(), SamplingParams)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or a list of ids. `lora` names
        one of lora_adapters for all prompts, or one for each; "" or None: none. Results are in the order of the
        prompts.

        Raises InvalidRequest, before any prompt is computed, if one is invalid or its constraint cannot be compiled,
        and EngineError if that takes longer than `grammar_s` for one of them. An output that fails later, since its
        parameters leave no token or the model's logits are not finite, ends with finish_reason error."""
        listed = _as_list(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = _one_for_each(given, len(listed))
        adapters = self._adapters(lora, len(listed))
        batch = _Batch(self.core, self._woken)
        is_default = sampling_params is None
        outputs = [self._add(batch, *one, is_default) for one in zip(listed, each, adapters, strict=True)]
        with self.torch_settings():
            batch.generate(use_tqdm=use_tqdm)
        return outputs

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora: str | Sequence[str | None] | None = None,
        chat_template: str | None = None,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}, as for the OpenAI port) or a list of them, with the
        model's chat template or the jinja source `chat_template`. `chat_template_kwargs` are the template's own
        switches. Raises InvalidRequest, for content that is not text too."""
        if self.tokenizer is None:
            raise InvalidRequest("messages", "chat requires the tokenizer, and skip_tokenizer_init is set")
        tokenizer = self.tokenizer if chat_template is None else self.tokenizer.with_chat_template(chat_template)
        given = _as_conversations(messages)
        _check_list("tools", tools or (), 'a list of {"type": "function", "function": {…}}', of=Mapping)
        template = tokenizer.chat_template
        form = tool_format_of(template.tool_source) if template is not None else None
        conversations = [template_messages(one, form) for one in given]
        variables = chat_template_kwargs or {}
        try:
            token_ids = [tokenizer.encode_chat(one, tools=tools, template_variables=variables) for one in conversations]
            texts = [tokenizer.render_chat(one, tools=tools, template_variables=variables) for one in conversations]
        except InvalidRequest as error:
            if error.field != "template_variables":
                raise
            raise InvalidRequest("chat_template_kwargs", error.problem, error.allowed) from None
        prompts = [{"prompt_token_ids": ids} for ids in token_ids]
        results = self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora=lora)
        for result, text in zip(results, texts, strict=True):
            result.prompt = text
        return results

    def _adapters(self, lora: str | Sequence[str | None] | None, num_prompts: int) -> list[str]:
        """The adapter of each prompt. Raises InvalidRequest."""
        given, known = lora or "", self.core.info.lora_adapters
        names = [given] * num_prompts if isinstance(given, str) else [name or "" for name in given]
        if len(names) != num_prompts:
            raise InvalidRequest(
                "lora", f"{len(names)} given for {num_prompts} prompts", "one for each, or one for all"
            )
        for name in names:
            if name not in ("", *known):
                allowed = ", ".join(known) if known else "none: LLM(lora_adapters={name: folder}) is not set"
                raise InvalidRequest("lora", f"{shown(name)} is not an adapter of this model", allowed)
        return names

    def _add(self, batch: _Batch, prompt: Prompt, params: SamplingParams, lora: str, is_default: bool) -> RequestOutput:
        """`is_default`: the model's own parameters, whose max_tokens is cut to the context."""
        info = self.core.info
        params = msgspec.structs.replace(params)  # callers may assign to theirs, before and later
        text, token_ids = self._tokens(prompt)
        validate_prompt(token_ids, info.vocab_size, info.max_model_len)
        if is_default and params.max_tokens is not None:
            params.max_tokens = min(params.max_tokens, info.max_model_len - len(token_ids))
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
            raise InvalidRequest("stop", "stop strings require the tokenizer, and skip_tokenizer_init is set")
        result = RequestOutput(f"offline-{next(self._ids)}", text, token_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        choices = []
        for index in range(params.n):
            output = CompletionOutput(index, "", [])
            if params.logprobs is not None:
                output.cumulative_logprob, output.logprobs = 0.0, []
            result.outputs.append(output)
            processor = OutputProcessor(self.tokenizer, params, prompt=token_ids)
            request = EngineRequest(
                request_id=f"{result.request_id}-{index}",
                prompt_token_ids=token_ids,
                params=params,
                eos_token_ids=eos_token_ids,
                seed=seed,
                choice=index,
                lora=lora,
            )
            choices.append(_Choice(request, output, result, processor, self.tokenizer))
        batch.add(choices)
        return result

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping):
            given = [name for name, value in prompt.items() if value is not None]
            if given not in (["prompt"], ["prompt_token_ids"]):
                raise InvalidRequest(
                    "prompt",
                    f"has keys {shown(sorted(given))}",
                    'exactly one of "prompt" and "prompt_token_ids", and no other',
                )
            prompt = prompt[given[0]]
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise InvalidRequest("prompt", f"{shown(prompt)} is {type(prompt).__name__}", _PROMPTS)
        if not isinstance(prompt, str):
            return None, [*prompt]
        if self.tokenizer is None:
            raise InvalidRequest(
                "prompt", "a text prompt requires the tokenizer, and skip_tokenizer_init is set", "token ids"
            )
        return prompt, self.tokenizer.encode(prompt)


@dataclass(slots=True)
class _Choice:
    request: EngineRequest
    output: CompletionOutput
    result: RequestOutput
    processor: OutputProcessor
    tokenizer: Tokenizer | None
    siblings: list[_Choice] = field(default_factory=list)
    """Started after this choice's first token, when the prompt's blocks can be shared."""
    grammar: CompiledGrammar | None = None
    """For the siblings: the compiler keeps only so many, and would begin again."""

    def add_logprobs(self, positions: Sequence[Sequence[TokenLogprob]]) -> None:
        if self.output.logprobs is None or self.output.cumulative_logprob is None:
            return
        for entries in positions:
            self.output.cumulative_logprob += entries[0].logprob
            self.output.logprobs.append(self._by_token_id(entries))

    def add_prompt_logprobs(self, positions: Sequence[Sequence[TokenLogprob]]) -> None:
        if positions:
            self.result.prompt_logprobs = [self._by_token_id(entries) if entries else None for entries in positions]

    def _by_token_id(self, entries: Sequence[TokenLogprob]) -> dict[int, Logprob]:
        return {entry.token_id: Logprob(entry.logprob, entry.rank, self._text(entry.token_id)) for entry in entries}

    def _text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)


class _StandardError:
    """For a progress bar: where standard error cannot be written, the bar is lost, and not the answers."""

    @property
    def encoding(self) -> str | None:
        return getattr(sys.stderr, "encoding", None)

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def write(self, text: str) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()


class _Batch:
    """The choices of one `LLM.generate` call: steps the core until all are finished, or aborts them."""

    def __init__(self, core: EngineCore, woken: threading.Event) -> None:
        """`woken` is set when the core has something to do after a step without work."""
        self._core = core
        self._woken = woken
        self._running: dict[str, _Choice] = {}
        self._num_tokens = 0
        self._queued: list[_Choice] = []

    def add(self, choices: list[_Choice]) -> None:
        """Queue one prompt's choices for `generate`."""
        choices[0].siblings = choices[1:]
        self._queued.append(choices[0])

    def generate(self, *, use_tqdm: bool) -> None:
        """Step the core until every choice is finished. On an error all choices are aborted; at the start, what is left
        of a call in which Ctrl-C interrupted that as well."""
        total, shown_at = len(self._queued), _StandardError()
        self._progress = tqdm(
            total=total, desc="Generating", unit="req", disable=not use_tqdm, dynamic_ncols=True, file=shown_at
        )
        try:
            self._core.handle(AbortRequests(list(self._core.scheduler.requests)))
            self._start(self._queued)
            self._core.await_grammars()
            while self._running:
                self._woken.clear()
                events = self._core.step()
                if self._core.idle and not events:
                    self._woken.wait(_IDLE_S)
                for event in events:
                    if isinstance(event, TokensEvent) and event.request_id in self._running:
                        self._apply(event)
        finally:
            self._core.handle(AbortRequests(list(self._running)))
            with contextlib.suppress(RankLost):  # the next call raises it; of this one an interrupt may be the reason
                self._core.step()
            self._progress.close()

    def _start(self, choices: list[_Choice], grammar: CompiledGrammar | None = None) -> None:
        """`grammar`: that of their constraint; None: it is not known yet, or there is none."""
        for choice in choices:
            self._running[choice.request.request_id] = choice
            choice.grammar = self._core.add(choice.request, grammar)

    def _apply(self, event: TokensEvent) -> None:
        choice = self._running[event.request_id]
        if event.error_kind in _OF_CALL:
            raise EngineError(f"{event.request_id}: {event.error}")
        output = choice.output
        if event.finish_reason == "error":
            _log.warning("%s ends with finish_reason error: %s", event.request_id, event.error)
            output.error = event.error
        delta = choice.processor.push(
            event.token_ids, finish_reason=event.finish_reason, stop_token_id=event.stop_token_id
        )
        output.text += delta.text
        output.token_ids += event.token_ids[: delta.num_tokens]
        choice.add_logprobs(event.logprobs[: delta.num_tokens])
        choice.add_prompt_logprobs(event.prompt_logprobs)
        if output.index == 0:
            choice.result.num_cached_tokens = max(choice.result.num_cached_tokens, event.num_cached_tokens)
        self._start(choice.siblings, choice.grammar)
        choice.siblings, choice.grammar = [], None
        self._show_rate(delta.num_tokens)
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            self._end(choice, aborts=event.finish_reason is None)

    def _end(self, choice: _Choice, *, aborts: bool) -> None:
        del self._running[choice.request.request_id]
        if aborts:
            self._core.handle(AbortRequests([choice.request.request_id]))
        choice.result.finished = all(output.finish_reason is not None for output in choice.result.outputs)
        if choice.result.finished:
            self._progress.update()

    def _show_rate(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed = self._progress.format_dict["elapsed"] if not self._progress.disable else 0.0
        if elapsed:
            self._progress.set_postfix_str(f"{self._num_tokens / elapsed:.0f} tok/s", refresh=False)


def _one_for_each(given: Any, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt, from a list of them or from one for all. Raises InvalidRequest."""
    each = [*given] if isinstance(given, Sequence) else [given] * num_prompts
    allowed = "one SamplingParams for each prompt, or one for all"
    if len(each) != num_prompts:
        raise InvalidRequest("sampling_params", f"{len(each)} given for {num_prompts} prompts", allowed)
    for params in each:
        if not isinstance(params, SamplingParams):
            problem = f"{shown(params)} is {type(params).__name__}, not engine.SamplingParams"
            raise InvalidRequest("sampling_params", problem, allowed)
    return each


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt. Raises InvalidRequest."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    _check_list("prompt", prompts, f"{_PROMPTS}, or a list of these")
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item, arg-type]


def _as_conversations(messages: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Of one conversation or several. Raises InvalidRequest."""
    allowed = 'a list of {"role": …, "content": …}, or a list of such lists'
    _check_list("messages", messages, allowed)
    given = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for one in given:
        _check_list("messages", one, allowed)
    return given


def _check_list(field: str, value: Any, allowed: str, of: type = object) -> None:
    """Raises InvalidRequest for what is no list, as text and bytes, and for items of another type than `of`."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    wrong = [item for item in value if not isinstance(item, of)] if is_list else [value]
    if wrong:
        raise InvalidRequest(field, f"{shown(wrong[0])} is {type(wrong[0]).__name__}", allowed)
