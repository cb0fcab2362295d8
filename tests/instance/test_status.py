"""What an engine's end is on the wire: a crash is told, a stop is not called one."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from engine.errors import EngineDeadError
from engine.messages import TokensEvent
from instance.status import ended_with_error, service_error
from serving.errors import Crashed, InternalError, InvalidArgument, Unavailable, received, status_text, trailers


@pytest.mark.parametrize(("crashed", "kind"), [(True, Crashed), (False, Unavailable)])
def test_a_crash_is_told_and_a_stop_is_not_called_one(crashed: bool, kind: type[Unavailable]) -> None:
    answer = service_error(EngineDeadError("the process ended with status -11", crashed=crashed))
    assert type(answer) is kind
    text = status_text(answer, "r1")
    assert "-11" not in text
    metadata = grpc.aio.Metadata(*trailers(answer, text))
    back = received(grpc.aio.AioRpcError(answer.code, grpc.aio.Metadata(), metadata, text))
    assert type(back) is kind


def test_wishes_that_leave_no_token_are_the_requests_fault_and_not_the_instances() -> None:
    event = TokensEvent("r1", [], "error", error="none is left", error_kind="nothing_allowed")
    assert isinstance(ended_with_error(event), InvalidArgument)
    assert isinstance(ended_with_error(TokensEvent("r1", [], "error", error="not finite")), InternalError)
