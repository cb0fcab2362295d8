"""Log lines can be read by machines and people, and not be abused by what clients send."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from serving import tracing
from serving.logging import (
    LogSettings,
    Repeats,
    RequestEvent,
    Timeline,
    configure,
    log_event,
    set_request_id,
    without_values,
)

log = logging.getLogger("tests.logging")


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("grpc", "opentelemetry.trace.span"))]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    set_request_id(None)


def written(kind: str) -> io.StringIO:
    stream = io.StringIO()
    configure(LogSettings(format=kind), stream)  # type: ignore[arg-type]
    return stream


def test_a_json_line_holds_the_request_and_its_event() -> None:
    stream = written("json")
    set_request_id("req-1")
    log_event(log, RequestEvent.FIRST_TOKEN, ttft_ms=12.5, instance="prefill-0", ratio=float("nan"))
    set_request_id(None)
    log.info("outside")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["request_id"] == "req-1"
    assert first["event"] == "first_token"
    assert first["fields"] == {"ttft_ms": 12.5, "instance": "prefill-0", "ratio": "nan"}
    assert "request_id" not in second


@pytest.mark.parametrize("kind", ["json", "human"])
def test_control_characters_cannot_fake_a_line_or_reach_a_terminal(kind: str) -> None:
    stream = written(kind)
    log.info("name %s", "a\nERROR fake\r\x1b[2J\x7f\x9b\u202e", extra={"fields": {"label": "x\ny"}})
    assert len(stream.getvalue().splitlines()) == 1
    assert not set(stream.getvalue()) & set("\r\x1b\x7f\x9b\u202e")


@pytest.mark.parametrize("state", ["!" * 8000, "a=1,a=2", ",".join(f"k{index}=v" for index in range(40)), "a=é"])
def test_a_callers_invalid_tracestate_writes_no_line(state: str) -> None:
    stream = written("json")
    caller = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    contextvars.copy_context().run(tracing.attach_caller_context, [caller, ("tracestate", f"b=1,{state}")])
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", ["json", "human"])
def test_credentials_are_blanked(kind: str) -> None:
    stream = written(kind)
    log.info(
        "store redis://user:hunter2@host and Authorization: Bearer abcdefgh123", extra={"fields": {"password": "p4"}}
    )
    try:
        raise ValueError("password=hunter2")
    except ValueError:
        log.exception("failed")
    for secret in ("hunter2", "abcdefgh123", "p4"):
        assert secret not in stream.getvalue()
    assert "ValueError" in stream.getvalue()


@pytest.mark.parametrize("kind", ["json", "human"])
@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2@host:6379/0",
        "Authorization: Basic aHVudGVyMg==",
        "authorization: bearer hunter2hunter2",
        "api_key=hunter2",
        "Api-Key: hunter2",
        "apikey=hunter2",
        "PASSWORD = hunter2",
        "secret: hunter2",
        "access_token=hunter2&x=1",
        "access-token: hunter2",
    ],
)
def test_credentials_of_every_form_are_blanked_in_messages_fields_and_tracebacks(kind: str, text: str) -> None:
    stream = written(kind)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("it said %s", text, extra={"fields": {"answer": text}})
    assert stream.getvalue().count("[redacted]") == 3
    assert "hunter2" not in stream.getvalue()
    assert "aHVudGVyMg" not in stream.getvalue()


@pytest.mark.parametrize("kind", ["json", "human"])
@pytest.mark.parametrize(
    "name", ["authorization", "api_key", "credentials", "password", "secret", "access_token", "Authorization"]
)
def test_fields_with_the_name_of_a_secret_are_blanked(kind: str, name: str) -> None:
    stream = written(kind)
    log.info("asked", extra={"fields": {name: "hunter2"}})
    assert "[redacted]" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_a_traceback_for_people_is_indented_below_its_line() -> None:
    stream = written("human")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("failed")
    head, *rest = stream.getvalue().splitlines()
    assert head.endswith("tests.logging failed")
    assert rest
    assert all(line.startswith("    | ") for line in rest)


def test_a_level_below_the_setting_is_not_written_and_a_long_message_is_cut() -> None:
    stream = written("json")
    log.debug("quiet")
    log.info("x" * 100_000)
    assert len(stream.getvalue()) < 10_000


def test_a_long_traceback_keeps_its_start_and_its_exception() -> None:
    stream = written("json")
    try:
        try:
            raise ValueError("x" * 100_000)
        except ValueError as error:
            raise KeyError("the last") from error
    except KeyError:
        log.exception("failed")
    assert len(stream.getvalue()) < 10_000
    traceback = json.loads(stream.getvalue())["traceback"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert "ValueError: xxx" in traceback
    assert traceback.endswith("KeyError: 'the last'")


def test_a_timeline_knows_gaps_counts_and_what_has_not_happened() -> None:
    timeline = Timeline()
    timeline.mark(RequestEvent.RECEIVED, 10.0)
    timeline.mark(RequestEvent.RESUMED, 10.5)
    timeline.mark(RequestEvent.RESUMED, 11.0)
    timeline.mark(RequestEvent.RECEIVED, 11.5)
    assert timeline.between(RequestEvent.RECEIVED, RequestEvent.RESUMED) == 0.5
    assert timeline.between(RequestEvent.RESUMED, RequestEvent.RECEIVED) is None, "none came before the first"
    assert timeline.count(RequestEvent.RESUMED) == 2
    assert timeline.at(RequestEvent.FINISHED) is None
    assert timeline.between(RequestEvent.RECEIVED, RequestEvent.FINISHED) is None
    assert timeline.milliseconds() == {"received_ms": 0.0, "resumed_ms": 500.0}
    assert timeline.mark(RequestEvent.FINISHED) > 0
    assert [event for event, _ in timeline.marks][-1] is RequestEvent.FINISHED
    assert timeline.between(RequestEvent.RESUMED, RequestEvent.FINISHED) is not None
    assert timeline.between(RequestEvent.RESUMED, RequestEvent.FINISHED, RequestEvent.RECEIVED) is None


def test_an_engine_core_logs_as_its_front_does() -> None:
    code = (
        "import logging; from serving.logging import configure_process; configure_process(level='info', format='json');"
        " logging.getLogger('kv_transfer.x').info('hello password=abc')"
    )
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    line = json.loads(written)
    assert (line["level"], line["logger"], line["message"]) == ("info", "kv_transfer.x", "hello password=[redacted]")


def test_equal_warnings_in_a_row_are_repeats_until_they_pause() -> None:
    repeats = Repeats(within_s=60.0)
    assert [repeats.is_repeat(warning) for warning in ("a", "a", "b", "a", "b")] == [False, True, False, True, True]
    pausing = Repeats(within_s=-1.0)
    assert [pausing.is_repeat("a") for _ in range(2)] == [False, False]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("only 3 of 17 pages came in time", "only 12 of 40 pages came in time", True),
        ("transfer '3f0c-a' was expired", "transfer '91' was expired", True),
        ("transfer '3f0c-a' was expired", "transfer '3f0c-a' was released", False),
    ],
)
def test_texts_that_differ_in_values_alone_are_equal_without_them(one: str, other: str, is_same: bool) -> None:
    assert (without_values(one) == without_values(other)) is is_same


def test_a_bounded_number_of_warnings_is_remembered() -> None:
    repeats = Repeats()
    for number in range(2000):
        repeats.is_repeat(number)
    assert len(repeats._seen_at_s) == 1000
    assert repeats.is_repeat(1999)
    assert not repeats.is_repeat(0)
