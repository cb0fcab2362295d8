"""One choice's output on its way to the wire: engine events become chunks whose ids and text arrive exactly once.

    begin (replays the emitted ids) ─▶ [replay (seed)] ─▶ chunk … chunk ─▶ finished

Index and offset go on where the replayed ids ended, whichever instance delivered those, because the text that k ids
have delivered is a function of the k ids alone. A stop string ends the choice here, cut exactly, whatever the core
thinks; the owner of the choice then aborts it there.
"""

from __future__ import annotations

from pathlib import Path

from engine.messages import FinishReason, TokenLogprob, TokensEvent
from engine.stop import Delta, OutputProcessor
from engine.tokenizer import Tokenizer
from instance.convert import Choice, finish_reason
from protos.tandem.v1 import common_pb2
from serving.errors import invalid_argument


class _NoText:
    """Stands in for `OutputProcessor` where the model's folder has no tokenizer: ids alone."""

    finish_reason: FinishReason | None = None

    def push(
        self, token_ids: list[int], *, finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> Delta:
        return Delta("", 0, len(token_ids), finish_reason, stop_token_id)

    def replay(self, token_ids: list[int]) -> Delta:
        return self.push(token_ids)


class ChoiceText:
    """Counts what has been delivered of one choice. Owned by whoever runs it."""

    def __init__(self, choice: Choice, processor: OutputProcessor | _NoText) -> None:
        self._choice = choice
        self._processor = processor
        self._num_ids = 0
        self.finished = False

    def replay(self, token_ids: list[int]) -> None:
        """Takes ids delivered elsewhere, before the first chunk. Raises InvalidArgument if they end the choice."""
        self._num_ids += len(token_ids)
        if token_ids and self._processor.replay(token_ids).finish_reason is not None:
            raise invalid_argument("emitted_token_ids", "hold a stop string: the choice has ended")

    def chunk(self, event: TokensEvent) -> common_pb2.TokenChunk:
        """The chunk for the engine's next tokens; with `finish` if they end the choice. None must follow that one."""
        delta = self._processor.push(
            event.token_ids, finish_reason=event.finish_reason, stop_token_id=event.stop_token_id
        )
        chunk = common_pb2.TokenChunk(
            stream_epoch=self._choice.stream_epoch,
            choice=self._choice.index,
            token_index=self._num_ids,
            token_ids=event.token_ids[: delta.num_tokens],
            text_offset=delta.text_offset,
            text=delta.text,
            logprobs=[_token_logprobs(entries) for entries in event.logprobs[: delta.num_tokens]],
            prompt_logprobs=[_token_logprobs(entries) for entries in event.prompt_logprobs],
        )
        self._num_ids += delta.num_tokens
        if delta.finish_reason is not None:
            self.finished = True
            chunk.finish.CopyFrom(self._finish(delta.finish_reason, delta.stop_reason, event))
        return chunk

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, event: TokensEvent) -> common_pb2.Finish:
        num_prompt = len(self._choice.engine_request.prompt_token_ids)
        usage = common_pb2.Usage(  # a resumed choice's KV is that of the prompt and of what was emitted before
            prompt_tokens=num_prompt,
            completion_tokens=self._num_ids,
            cached_tokens=min(event.num_cached_tokens, num_prompt),
            external_tokens=min(event.num_external_tokens, num_prompt),
            recomputed_tokens=min(event.num_recomputed_tokens, num_prompt),
        )
        return common_pb2.Finish(
            reason=finish_reason(reason),
            stop_string=stop_reason if isinstance(stop_reason, str) else None,
            stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
            usage=usage,
        )


def _token_logprobs(entries: list[TokenLogprob]) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        candidates=[
            common_pb2.Logprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank) for entry in entries
        ]
    )


class TextMaker:
    """Begins the text of choices. `tokenizer` None: the model has none, and text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> TextMaker:
        """Of a model's folder, which for benchmarks may hold no tokenizer."""
        return cls(Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None)

    def begin(self, choice: Choice) -> ChoiceText:
        """A text that has taken the ids emitted so far. Raises InvalidArgument where it cannot be."""
        request = choice.engine_request
        processor: OutputProcessor | _NoText
        if self._tokenizer is None:
            if request.params.stop:
                raise invalid_argument(
                    "request.sampling.stop", "needs a tokenizer, and this model has none", "no stop strings"
                )
            processor = _NoText()
        else:
            processor = OutputProcessor(self._tokenizer, request.params, prompt=request.prompt_token_ids)
        text = ChoiceText(choice, processor)
        text.replay(request.output_token_ids)
        return text
