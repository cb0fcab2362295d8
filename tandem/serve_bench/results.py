"""The results of a bench: what was asked for, on what machine, and of every rate what was seen. One JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from engine.machine import available_bytes, cpu_quota, usable_cores
from tandem.serve_bench.records import RequestRecord
from tandem.serve_bench.report import Report

SCHEMA_VERSION = 1
_PACKAGES = ("tandem-llm", "grpcio", "protobuf", "httpx", "numpy")
_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    rate: float | None
    """Requests a second that were asked for; inf: all at once; None: as in the trace."""
    report: Report
    records: Sequence[RequestRecord] = ()


@dataclass(slots=True)
class Results:
    """Everything of one `tandem bench serve`, whole or interrupted."""

    endpoint: str
    model: str
    settings: Mapping[str, Any]
    """The options by name, as they were used: the seed too."""
    points: list[Point] = field(default_factory=list)
    counting: str = ""
    """How output tokens were counted; see Endpoint."""
    stopped_by: str = ""
    """What ended it before its time, in words; empty: nothing did."""
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def write_json(path: Path, results: Results, *, with_records: bool) -> None:
    """Writes `results` to `path`, whole or not at all; with each request if asked. Raises OSError."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "started_at": results.started_at,
        "partial": bool(results.stopped_by),
        "stopped_by": results.stopped_by,
        "endpoint": results.endpoint,
        "model": results.model,
        "counting": results.counting,
        "settings": dict(results.settings),
        "versions": versions(),
        "machine": machine(),
        "points": [_as_dict(point, with_records=with_records) for point in results.points],
    }
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False, default=str) + "\n")
    unfinished.rename(path)


def _as_dict(point: Point, *, with_records: bool) -> dict[str, Any]:
    rate = "inf" if point.rate == math.inf else point.rate  # JSON has no infinity
    named = {"rate": rate, "kept_schedule": point.report.kept_schedule, **asdict(point.report)}
    return {**named, "requests": [asdict(record) for record in point.records]} if with_records else named


def versions() -> dict[str, str]:
    """Of Python and the packages that took part, and of this source tree if it is one."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if (described := _git_describe()) is not None:
        found["git"] = described
    return found


def machine() -> dict[str, Any]:
    """The machine that made the load, which is the endpoint's too if that is local."""
    return {
        "cores": len(usable_cores()),
        "cpu_quota": cpu_quota(),
        "cpu": _cpu_name(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": available_bytes(),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git_describe() -> str | None:
    """None outside a checkout or without git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--tags"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
