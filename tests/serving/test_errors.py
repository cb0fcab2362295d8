"""Errors reach the client with their details and without our internals."""

from __future__ import annotations

import logging
import math

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

from serving.errors import (
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
    from_rpc_error,
    invalid_argument,
    read_details,
    status_text,
    trailers,
)
from serving.interceptor import REQUEST_ID_KEY
from tests.process_logs import ProcessLogs
from tests.serving.conftest import Rigs, trailers_of


async def test_an_invalid_field_is_named_in_text_and_details(rigs: Rigs) -> None:
    rig = await rigs.start()
    error = await rig.refusal("invalid", metadata=((REQUEST_ID_KEY, "req-7"),))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling.temperature: nan is not finite; allowed: 0..2 (request id req-7)"
    back = from_rpc_error(error)
    assert isinstance(back, InvalidArgument)
    assert [(v.field, v.description) for v in back.violations] == [
        ("sampling.temperature", "nan is not finite; allowed: 0..2")
    ]


@pytest.mark.parametrize("text", ["broken", "cancelled inside", "wrong answer"])
async def test_an_unexpected_error_shows_the_request_id_and_nothing_else(
    rigs: Rigs, text: str, caplog: pytest.LogCaptureFixture, process_logs: ProcessLogs
) -> None:
    rig = await rigs.start()
    with caplog.at_level(logging.ERROR), process_logs.expected("GenerationService.Generate"):
        error = await rig.refusal(text, metadata=((REQUEST_ID_KEY, "req-8"),))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "internal error (request id req-8)"
    assert trailers_of(error) == {}
    assert any(record.exc_info for record in caplog.records)  # the log has the traceback


async def test_a_request_without_an_id_gets_one(rigs: Rigs) -> None:
    rig = await rigs.start()
    error = await rig.refusal("invalid", metadata=((REQUEST_ID_KEY, "not an id\x7e!"),))
    minted = (error.details() or "").rpartition("request id ")[2].rstrip(")")
    assert len(minted) == 32


async def test_a_peers_error_that_is_passed_on_has_one_request_id(rigs: Rigs) -> None:
    """The peer's own goes with it: the process that passes the error on names the request as its caller does."""
    rig = await rigs.start()
    back = from_rpc_error(await rig.refusal("invalid", metadata=((REQUEST_ID_KEY, "req-7"),)))
    assert status_text(back, "mine") == "sampling.temperature: nan is not finite; allowed: 0..2 (request id mine)"


async def test_a_full_house_says_when_to_come_back(rigs: Rigs) -> None:
    rig = await rigs.start()
    error = await rig.refusal("full")
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers_of(error)["grpc-retry-pushback-ms"] == "1500"
    assert from_rpc_error(error).retry_after_s == 1.5


async def test_a_used_up_quota_says_not_to_come_back(rigs: Rigs) -> None:
    rig = await rigs.start()
    error = await rig.refusal("quota")
    assert trailers_of(error)["grpc-retry-pushback-ms"] == "-1"
    assert from_rpc_error(error).retry_after_s is None


async def test_an_absent_peer_is_unavailable_and_its_address_stays_here(rigs: Rigs) -> None:
    rig = await rigs.start()
    port = rig.server.port
    await rig.server.stop()
    back = from_rpc_error(await rig.refusal("hello"))
    assert isinstance(back, Unavailable)
    assert str(port) not in back.message


def test_unavailable_always_says_when_to_come_back() -> None:
    assert trailers(Unavailable("no instance"), "x")[0] == ("grpc-retry-pushback-ms", "1000")
    assert trailers(Unavailable("no instance", 0.25), "x")[0] == ("grpc-retry-pushback-ms", "250")


def test_messages_are_short_printable_ascii() -> None:
    assert status_text(NotFound("allowed: name ::= …"), None) == "allowed: name ::= ..."
    text = status_text(NotFound("no model \x1b[31m\n" + "é" * 2000), "r" * 128)
    assert len(text.encode()) <= 512
    assert text.isascii()
    assert text.isprintable()
    assert text.endswith(f"(request id {'r' * 128})")


def test_the_details_of_a_hundred_violations_still_fit_the_trailers() -> None:
    many = [violation for i in range(100) for violation in invalid_argument(f"f{i}" * 99, "x" * 9999).violations]
    carried = trailers(InvalidArgument("bad", many), "bad")
    assert sum(len(key) + len(value) for key, value in carried) < 4096


def test_errors_without_details_carry_no_trailers() -> None:
    assert trailers(InternalError("x"), "x") == ()
    assert trailers(Overloaded("x", 0.0), "x")[0] == ("grpc-retry-pushback-ms", "0")


@pytest.mark.parametrize("retry_after_s", [math.nan, math.inf])
def test_a_hint_that_is_no_time_is_left_out(retry_after_s: float) -> None:
    assert trailers(Unavailable("x", retry_after_s), "x") == trailers(Overloaded("x", retry_after_s), "x") == ()


def test_details_that_are_broken_inside_are_left_out() -> None:
    status = status_pb2.Status(
        details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff")]
    )
    assert read_details([("grpc-status-details-bin", status.SerializeToString())]) == ([], None)
    assert read_details([("grpc-status-details-bin", b"\xff")]) == ([], None)
