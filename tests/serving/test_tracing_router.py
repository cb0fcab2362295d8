"""What a request waits for in the router: stages without a gap, whatever becomes of its attempts."""

from __future__ import annotations

import itertools

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import RunHttp, run_http
from tests.router.conftest import Run, model, model_folder, run
from tests.router.failing import busy, decodes
from tests.router.rig import PROMPT, SHORT, request_of
from tests.serving.spans import METADATA, SPAN_ID, Spans, id_of, parent_of, spans, trace_ids
from tests.waiting import until

__all__ = ["model", "model_folder", "run", "run_http", "spans"]

BEFORE = ["router.validate", "router.queue"]
SPLIT = ["router.pick", "router.reserve", "router.prefill", "router.hand_over", "router.decode"]


def stages(spans: Spans, choice: int = 0) -> list[ReadableSpan]:
    """Those of the request up to its admission, and of one choice, by their beginning."""
    own = [
        span for span in spans.all() if span.name in BEFORE or (span.attributes or {}).get("tandem.choice") == choice
    ]
    return sorted(own, key=lambda span: span.start_time or 0)


def names(some: list[ReadableSpan]) -> list[str]:
    return [span.name for span in some]


def assert_no_gap(some: list[ReadableSpan]) -> None:
    assert some
    for earlier, later in itertools.pairwise(some):
        assert earlier.end_time == later.start_time, f"{earlier.name} ends, and {later.name} begins, at another time"


async def test_a_split_request_waits_for_one_thing_after_the_other(run: Run, spans: Spans) -> None:
    async with run() as rig:
        call = rig.stub.Generate(request_of(), metadata=METADATA)
        assert sum([len(response.tokens.token_ids) async for response in call]) == 12
    (whole,) = await spans.named("router.generate")
    found = stages(spans)
    assert names(found) == BEFORE + SPLIT
    assert_no_gap(found)
    assert found[0].start_time == whole.start_time
    assert (found[-1].end_time or 0) <= (whole.end_time or 0)
    assert {parent_of(span) for span in found} == {id_of(whole)}
    assert parent_of(whole) == int(SPAN_ID, 16)
    assert len(trace_ids(whole, *found)) == 1
    reserve = found[3]
    assert reserve.attributes == {"tandem.choice": 0, "tandem.decode": "decode-0", "tandem.prefill": "prefill-0"}
    assert all(span.status.status_code is StatusCode.UNSET for span in found)


async def test_a_request_that_is_not_split_has_neither_reservation_nor_hand_over(run: Run, spans: Spans) -> None:
    async with run() as rig:
        assert (await rig.generate(prompt=SHORT)).is_exactly(12, prompt=SHORT)
    await spans.named("router.generate")
    assert names(stages(spans)) == [*BEFORE, "router.pick", "router.prefill", "router.decode"]
    assert_no_gap(stages(spans))


async def test_each_choice_has_its_stages_and_the_others_begin_with_the_first_token(run: Run, spans: Spans) -> None:
    async with run() as rig:
        await rig.generate(n=3)
    await spans.named("router.generate")
    first = stages(spans)
    assert_no_gap(first)
    given = next(span for span in first if span.name == "router.hand_over")
    for choice in (1, 2):
        own = [span for span in stages(spans, choice) if span.name not in BEFORE]
        assert_no_gap(own)
        assert names(own)[0] == "router.pick"
        assert (own[0].start_time or 0) >= (given.start_time or 0)


async def test_each_prompt_of_one_http_request_has_a_span_of_its_own(run_http: RunHttp, spans: Spans) -> None:
    async with run_http() as http:
        body = {"prompt": [PROMPT, SHORT], "max_tokens": 2}
        assert (await http.http.post("/v1/completions", json=body, headers=dict(METADATA))).status_code == 200
        await until(lambda: spans.names().count("router.generate") == 2)
    wholes = [span for span in spans.all() if span.name == "router.generate"]
    assert {parent_of(whole) for whole in wholes} == {int(SPAN_ID, 16)}
    for name in (*BEFORE, "router.pick", "router.prefill"):
        assert {parent_of(span) for span in spans.all() if span.name == name} == set(map(id_of, wholes)), name


async def test_an_http_request_takes_no_trace_from_the_one_before_it(run_http: RunHttp, spans: Spans) -> None:
    too_long = {"prompt": "x" * 1_000_000}  # reading of the connection pauses meanwhile
    async with run_http() as http:
        assert (await http.http.post("/v1/completions", json=too_long, headers=dict(METADATA))).status_code == 400
        assert (await http.post(prompt=SHORT, max_tokens=1)).status_code == 200
        await until(lambda: spans.names().count("router.generate") == 2)
    parents = [parent_of(span) for span in spans.all() if span.name == "router.generate"]
    assert parents == [int(SPAN_ID, 16), None]


@pytest.mark.parametrize("at", [0, 5])
async def test_an_attempt_that_fails_ends_its_stage_and_another_follows(run: Run, spans: Spans, at: int) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(fail_at=at), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
    await spans.named("router.generate")
    found = stages(spans)
    assert_no_gap(found)
    attempt = ["router.pick", "router.prefill", "router.decode"]
    assert names(found) == BEFORE + (attempt[:2] if at == 0 else attempt) + attempt
    failed = [span for span in found if span.status.status_code is StatusCode.ERROR]
    assert names(failed) == ["router.prefill" if at == 0 else "router.decode"]
    assert "a fault that the test asked for" in (failed[0].status.description or "")


async def test_a_cancelled_or_rejected_request_leaves_no_stage_open(run: Run, spans: Spans) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=Behaviour(token_s=0.02))]) as rig:
        # STEP a client that leaves
        call = rig.call(max_tokens=1000)
        await anext(aiter(call))
        call.cancel()
        await rig.until_idle()
        await spans.named("router.generate")
        last = stages(spans)[-1]
        assert last.status.description == "CancelledError"
        num_spans = len(spans.all())
        # STEP a request that is none
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate(prompt=[])
        refused, whole = spans.all()[num_spans:]
        assert (refused.name, whole.name) == ("router.validate", "router.generate")
        assert refused.status.status_code is StatusCode.ERROR


async def test_without_an_sdk_all_is_as_ever(run: Run) -> None:
    async with run() as rig:
        assert (await rig.generate(n=2)).is_exactly(12, choice=1)
