"""How far it is: a bar on a terminal, lines elsewhere, figures on standard output."""

from __future__ import annotations

import asyncio
import io
import sys
import time

import pytest

from tandem.bench.serve.endpoint import PlannedRequest, RequestRecord
from tandem.bench.serve.load import Progress
from tandem.bench.serve.report import Objectives, Point, Results, summarise
from tandem.commands.bench.serve import LoadDisplay

POINT = Point(2.0, summarise([RequestRecord(0.0, 0.0, 10, 1, [0.1], 0.1, "length")]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def display() -> LoadDisplay:
    return LoadDisplay(Objectives(), Results("endpoint", "model", {}), asyncio.Event())


def run(screen: LoadDisplay) -> None:
    screen.warm_up(2.0, 4)
    screen.begin(2.0, [PlannedRequest(0.0, (1,), 1)] * 10)
    for in_flight, done, failed in ((3, 4, 1), (4, 4, 1)):
        time.sleep(0.15)  # a bar is drawn ten times a second at the most
        screen.progress(Progress(in_flight=in_flight, done=done, failed=failed))
    screen.end(POINT)
    screen.close()


def test_on_a_terminal_a_bar_shows_requests_in_flight_done_and_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    run(display())
    drawn = terminal.getvalue()
    assert "4/10" in drawn
    assert "failed=1, in_flight=3" in drawn
    assert "failed=1, in_flight=4" in drawn
    assert "1 ok, 0 failed" in capsys.readouterr().out


def test_a_closed_standard_error_costs_the_progress_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    run(display())
    assert "1 ok, 0 failed" in capsys.readouterr().out


def test_elsewhere_there_is_a_line_for_each_run_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    run(display())
    out, err = capsys.readouterr()
    assert err == "2/s: warming up with 4 requests …\n2/s: 10 requests …\n"
    assert out.startswith("2/s\n  requests    1 ok")
