"""The references in docs/request_path.md lead somewhere, and the page names every event of a request's good life."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from serving.logging import RequestEvent

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/request_path.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)))


def defined_names(path: Path) -> set[str]:
    """Functions, classes and `Class.method`s of a module."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text()).body, "")
    return names


def test_the_page_has_references() -> None:
    assert len(REFERENCES) >= 30
    assert PAGE.count(".py:") == len(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)), "one is written differently"


@pytest.mark.parametrize(("file", "name"), REFERENCES, ids=":".join)
def test_reference_resolves(file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"{file} does not exist"
    assert name in defined_names(path), f"{file} has no {name}"


def test_every_event_of_a_good_life_stands_on_the_page() -> None:
    events = list(RequestEvent)
    good = events[: events.index(RequestEvent.FINISHED) + 1]
    assert [event.name for event in good if event.name not in PAGE] == []
