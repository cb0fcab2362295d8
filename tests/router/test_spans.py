"""The router's span of a request."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import pytest
from opentelemetry import trace

from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import request_of
from tests.serving.spans import Spans, spans
from tests.waiting import until

__all__ = ["spans"]


async def test_the_span_has_decision_and_reason_and_is_the_calls_parent(run: Run, spans: Spans) -> None:
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with run() as rig:
        call = rig.stub.Generate(request_of(request_id="mine"), timeout=20, metadata=(("traceparent", caller),))
        assert sum([len(response.tokens.token_ids) async for response in call]) == 12
        (span,) = await spans.named("router.generate")
        attributes = dict(span.attributes or {})
        assert (attributes["tandem.decision"], attributes["tandem.reason"]) == ("disaggregate", "unmeasured")
        assert "100 tokens" in str(attributes["tandem.why"])
        assert (attributes["tandem.prefill"], attributes["tandem.decode"]) == ("prefill-0", "decode-0")
        assert attributes["gen_ai.request.id"] == "mine"
        assert span.context is not None
        assert span.parent is not None
        assert trace.format_trace_id(span.context.trace_id) in caller
        assert trace.format_span_id(span.parent.span_id) in caller
        metadata = [
            dict(record.detail) for record in (*rig.prefill[0].recorded("call"), *rig.decode[0].recorded("call"))
        ]
        assert len(metadata) == 2
        for each in metadata:
            assert trace.format_span_id(span.context.span_id) in each["traceparent"]


@pytest.mark.parametrize("lora", ["poet", ""])
async def test_the_span_and_the_log_line_name_the_adapter_if_there_is_one(
    run: Run, spans: Spans, caplog: pytest.LogCaptureFixture, lora: str
) -> None:
    caplog.set_level(logging.INFO)
    decode = [FakeInstance("decode", behaviour=Behaviour(lora_adapters=["poet"]))]
    async with run(prefill=0, decode=decode) as rig:
        await rig.generate(lora=lora)
        (span,) = await spans.named("router.generate")
        await until(lambda: any(record.__dict__.get("event") == "finished" for record in caplog.records))
    (ended,) = (record for record in caplog.records if record.__dict__.get("event") == "finished")
    assert dict(span.attributes or {}).get("tandem.lora", "") == ended.__dict__["fields"].get("lora", "") == lora


async def test_the_span_of_a_rejected_request_has_the_reason_and_failed(run: Run, spans: Spans) -> None:
    async with run(prefill=0, disaggregation={"mode": "always"}) as rig:
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate()
        (span,) = await spans.named("router.generate")
        assert dict(span.attributes or {})["tandem.decision"] == "refuse"
        assert not span.status.is_ok
