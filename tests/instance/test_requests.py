"""Chunks continue exactly where replayed ids ended, and a stop string ends the choice wherever the instances meet."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, cast

import grpc
import grpc.aio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.messages import EngineRequest, RemoteKV, TokenLogprob, TokensEvent
from engine.errors import EngineDeadError
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from instance.convert import Choice
from instance.requests import ChoiceStream, ChunkBuilder, ended_with_error, service_error
from protos.tandem.v1 import common_pb2
from serving.errors import Crashed, InternalError, InvalidArgument, Unavailable, from_rpc_error, status_text, trailers
from tests.tokenizer_builders import byte_level

TOKENIZER = byte_level()
TEXT = "It was the best of times, 漢字 and STOP here. 😀 END"


def begin(
    emitted: list[int] | None = None,
    *,
    prompt: list[int] | None = None,
    tokenizer: Tokenizer | None = TOKENIZER,
    remote_kv: RemoteKV | None = None,
    **params: object,
) -> ChunkBuilder:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=prompt or [1, 2, 3],
        output_token_ids=emitted or [],
        params=SamplingParams(**{"max_tokens": 1000} | params),  # type: ignore[arg-type]
        remote_kv=remote_kv,
    )
    return ChunkBuilder(Choice(stream_epoch=5, index=1, engine_request=request), tokenizer)


def tokens(ids: list[int], reason: str | None = None) -> TokensEvent:
    return TokensEvent("r", ids, finish_reason=reason, num_cached_tokens=2)  # type: ignore[arg-type]


def run(ids: list[int], cuts: list[int], **params: Any) -> list[common_pb2.TokenChunk]:
    """The chunks of several instances: handed over at each cut, each instance replaying what came before."""
    chunks: list[common_pb2.TokenChunk] = []
    bounds = [0, *sorted(cuts), len(ids)]
    for start, end in pairwise(bounds):
        text = begin(ids[:start], **params)
        for place in range(start, end):
            reason = "length" if place == len(ids) - 1 else "hand_over" if place == end - 1 else None
            chunks.append(text.chunk(tokens([ids[place]], reason)))
            if text.finished and chunks[-1].finish.reason != common_pb2.FINISH_REASON_HAND_OVER:
                return chunks
    return chunks


def joined(chunks: list[common_pb2.TokenChunk]) -> tuple[list[int], str]:
    """The ids and the text, after a check that indices and offsets have neither gap nor repeat."""
    ids: list[int] = []
    text = ""
    for chunk in chunks:
        assert (chunk.stream_epoch, chunk.choice) == (5, 1)
        assert (chunk.token_index, chunk.text_offset) == (len(ids), len(text))
        ids += chunk.token_ids
        text += chunk.text
    return ids, text


@given(cuts=st.lists(st.integers(0, 40), max_size=4), stop=st.sampled_from([(), ("STOP",), ("字 a", "D"), ("zzz",)]))
def test_cutting_a_choice_anywhere_changes_nothing(cuts: list[int], stop: tuple[str, ...]) -> None:
    ids = byte_level().encode(TEXT)
    cuts = [cut for cut in cuts if 0 < cut < len(ids)]
    whole, parts = run(ids, [], stop=stop), run(ids, cuts, stop=stop)
    if len(parts) >= len(whole):  # a replay past the stop string is refused, see below
        assert joined(parts) == joined(whole)
        assert parts[-1].finish.reason == whole[-1].finish.reason


def test_a_stop_string_across_the_hand_over_is_cut_exactly() -> None:
    ids = byte_level().encode("aSTOPb")
    for cut in range(1, len(ids)):
        chunks = run(ids, [cut], stop=("STOP",))
        got_ids, text = joined(chunks)
        assert text == "a"
        assert chunks[-1].finish.reason == common_pb2.FINISH_REASON_STOP
        assert chunks[-1].finish.stop_string == "STOP"
        assert chunks[-1].finish.usage.completion_tokens == len(got_ids)


def test_ids_after_the_stop_string_are_not_delivered() -> None:
    ids = byte_level().encode("x!") + byte_level().encode("yyyy")
    chunk = begin(stop=("!",)).chunk(tokens(ids))
    assert list(chunk.token_ids) == byte_level().encode("x!")
    assert chunk.text == "x"
    assert chunk.finish.usage.completion_tokens == len(chunk.token_ids)


def test_text_that_waits_is_delivered_at_the_end_and_not_at_a_hand_over() -> None:
    ids = byte_level().encode("ST")
    assert begin(stop=("STOP",)).chunk(tokens(ids, "hand_over")).text == ""
    assert begin(stop=("STOP",)).chunk(tokens(ids, "length")).text == "ST"


def test_the_last_chunk_has_the_usage() -> None:
    text = begin([7, 8])
    text.chunk(tokens([9]))
    was_finished = text.finished
    chunk = text.chunk(tokens([10], "length"))
    assert (was_finished, text.finished) == (False, True)
    usage = chunk.finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
    assert not chunk.finish.HasField("stop_string")


@pytest.mark.parametrize(
    ("transfer", "counts"), [(None, (3, 0, 1)), (RemoteKV(transfer_id="t", reservation_s=1.0), (2, 1, 0))]
)
def test_kv_from_elsewhere_was_in_a_store_unless_it_was_handed_over(
    transfer: RemoteKV | None, counts: tuple[int, int, int]
) -> None:
    text = begin(remote_kv=transfer)
    event = msgspec.structs.replace(tokens([10], "length"), num_external_tokens=1)
    usage = text.chunk(event).finish.usage
    assert (usage.cached_tokens, usage.external_tokens, usage.stored_tokens) == counts


@pytest.mark.parametrize(
    ("found", "counts"),
    [((96, 64, 0), (96, 4, 0)), ((96, 16, 48), (96, 4, 0)), ((64, 32, 64), (64, 32, 4)), ((128, 16, 16), (100, 0, 0))],
)
@pytest.mark.parametrize("split", [True, False])
def test_usage_counts_kv_of_the_prompt_alone_where_a_choice_is_resumed(
    split: bool, found: tuple[int, int, int], counts: tuple[int, int, int]
) -> None:
    cached, external, recomputed = found
    if not split and recomputed:
        return  # without a transfer nothing was expected
    transfer = RemoteKV(transfer_id="t", reservation_s=1.0) if split else None
    text = begin([7] * 60, prompt=[1] * 100, tokenizer=None, remote_kv=transfer)
    event = TokensEvent(
        "r",
        [7],
        finish_reason="length",
        num_cached_tokens=cached,
        num_external_tokens=external,
        num_recomputed_tokens=recomputed,
    )
    usage = text.chunk(event).finish.usage
    cached, external, recomputed = counts
    expected = (cached, external, recomputed, 0) if split else (cached + external, 0, 0, external)
    got = usage.cached_tokens, usage.external_tokens, usage.recomputed_tokens, usage.stored_tokens
    assert got == expected


def test_emitted_ids_that_hold_a_stop_string_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="stop string"):
        begin(byte_level().encode("aSTOPb"), stop=("STOP",))


def test_without_a_tokenizer_ids_go_out_alone() -> None:
    text = begin([7], tokenizer=None)
    chunk = text.chunk(tokens([9], "length"))
    assert (chunk.token_index, list(chunk.token_ids), chunk.text) == (1, [9], "")
    with pytest.raises(InvalidArgument, match="tokenizer"):
        begin(tokenizer=None, stop=("x",))


def test_logprobs_belong_to_the_delivered_ids() -> None:
    ids = byte_level().encode("aSTOPb")
    text = begin(stop=("STOP",))
    entries = [[TokenLogprob(one, -0.5 * one, 2), TokenLogprob(3, -0.25, 1)] for one in ids]
    prompt = [[], [TokenLogprob(2, -0.75, 4)], [TokenLogprob(3, -0.125, 1)]]
    chunk = text.chunk(msgspec.structs.replace(tokens(ids), logprobs=entries, prompt_logprobs=prompt))
    assert [[one.token_id for one in position.candidates] for position in chunk.prompt_logprobs] == [[], [2], [3]]
    assert chunk.finish.reason == common_pb2.FINISH_REASON_STOP
    assert len(chunk.logprobs) == len(chunk.token_ids) < len(ids)
    for token_id, position in zip(chunk.token_ids, chunk.logprobs, strict=True):
        own, best = position.candidates
        assert (own.token_id, own.logprob, own.rank) == (token_id, -0.5 * token_id, 2)
        assert (best.token_id, best.logprob, best.rank) == (3, -0.25, 1)


# gRPC errors for an engine's end: a crash is reported as one, a shutdown is not.


@pytest.mark.parametrize(("crashed", "kind"), [(True, Crashed), (False, Unavailable)])
def test_a_crash_is_reported_and_a_shutdown_is_not_called_one(crashed: bool, kind: type[Unavailable]) -> None:
    answer = service_error(EngineDeadError("the process ended with status -11", crashed=crashed))
    assert type(answer) is kind
    text = status_text(answer, "r1")
    assert "-11" not in text
    metadata = grpc.aio.Metadata(*trailers(answer, text))
    back = from_rpc_error(grpc.aio.AioRpcError(answer.code, grpc.aio.Metadata(), metadata, text))
    assert type(back) is kind


def test_parameters_that_exclude_every_token_are_an_invalid_argument() -> None:
    event = TokensEvent("r1", [], "error", error="none is left", error_kind="nothing_allowed")
    assert isinstance(ended_with_error(event), InvalidArgument)
    assert isinstance(ended_with_error(TokensEvent("r1", [], "error", error="not finite")), InternalError)


async def test_the_loop_does_not_convert_the_log_probabilities_of_a_prompt() -> None:
    """A message has a hundred thousand candidates at most."""
    threads = list[threading.Thread]()

    class Recorded(ChunkBuilder):
        def chunk(self, event: TokensEvent) -> common_pb2.TokenChunk:
            threads.append(threading.current_thread())
            return super().chunk(event)

    async def events() -> AsyncIterator[TokensEvent]:
        entries = [TokenLogprob(1, -1.0, 1)]
        yield msgspec.structs.replace(tokens([2]), prompt_logprobs=[[], entries, entries])
        yield tokens([2], "length")

    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=2))
    choice = Choice(stream_epoch=5, index=0, engine_request=request)
    stream = ChoiceStream(choice, cast(Any, events()), Recorded(choice, TOKENIZER), cast(Any, None))
    first, last = [chunk async for chunk in stream]
    assert isinstance(first, common_pb2.TokenChunk)
    assert [len(one.candidates) for one in first.prompt_logprobs] == [0, 1, 1]
    assert first.usage.prompt_tokens == 3
    assert isinstance(last, common_pb2.TokenChunk)
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
