"""The comparison with `vllm bench serve`: its figures under our names, and the error if it is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.peers.vllm_bench_serve import main, our_figures, side_by_side, vllms_figures
from tandem.bench.serve.endpoint import RequestRecord
from tandem.bench.serve.report import Point, Results, summarise, write_json
from tandem.demo import MODEL_DIR

COMMON = ("--model", "fake", "--tokenizer", str(MODEL_DIR))


def test_a_missing_vllm_is_reported() -> None:
    result = CliRunner().invoke(main, ["--url", "http://127.0.0.1:1", *COMMON, "--vllm", "no-such-vllm"])
    assert result.exit_code == 1
    assert "`no-such-vllm` was not found" in result.output
    assert "--vllm PATH" in result.output


def test_a_run_that_fails_ends_it_with_its_message(tmp_path: Path) -> None:
    broken = tmp_path / "vllm"
    broken.write_text(f"#!{sys.executable}\nimport sys; sys.exit('it is broken')\n")
    broken.chmod(0o700)
    result = CliRunner().invoke(main, ["--url", "http://127.0.0.1:1", *COMMON, "--vllm", str(broken)])
    assert result.exit_code == 1
    assert "failed (1)" in result.output


def test_equal_runs_have_ratios_of_one(tmp_path: Path) -> None:
    # two requests: TTFT 100 and 300 ms, gaps 50 and 150 ms, E2E 150 and 450 ms; 0.45 s in all
    run = [RequestRecord(0, 0, 8, 2, [0.1, 0.15], 0.15), RequestRecord(0, 0, 8, 2, [0.3, 0.45], 0.45)]
    write_json(tmp_path / "j", Results("", "", {}, [Point(1.0, summarise(run))]), with_records=False)
    ours = our_figures(json.loads((tmp_path / "j").read_text()))
    theirs = {"request_throughput": 2 / 0.45, "output_throughput": 4 / 0.45, "completed": 2, "total_output_tokens": 4}
    for metric, low, high in (("ttft", 100, 300), ("itl", 50, 150), ("tpot", 50, 150), ("e2el", 150, 450)):
        theirs[f"mean_{metric}_ms"] = (low + high) / 2
        theirs |= {f"p{part}_{metric}_ms": low + (high - low) * part / 100 for part in (50, 90, 95, 99)}
    assert ours == pytest.approx(vllms_figures(theirs))
    head, *lines = side_by_side([ours], [vllms_figures(theirs)])
    assert head.split() == ["tandem", "vllm", "ratio"]
    assert len(lines) == len(ours)
    assert all(line.endswith("   1.000") for line in lines)


def test_a_figure_is_the_median_of_the_rounds() -> None:
    (_, line) = side_by_side([{"x": 1.0}, {"x": 6.0}, {"x": 2.0}], [{"x": 4.0}, {"x": 4.0}, {"x": 0.0}])
    assert line.split() == ["x", "2.00", "4.00", "0.500"]
