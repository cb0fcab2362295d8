"""Every promise stands on docs/reliability.md with tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.test_request_path import ROOT, defined_names

PAGE = (ROOT / "docs/reliability.md").read_text()
PROMISES = dict(re.findall(r"^\| (P\d+) \|(.*)$", PAGE, re.MULTILINE))
REFERENCES = sorted(set(re.findall(r"`(tests/[\w/]+\.py):(\w+)`", PAGE)))


def test_every_promise_names_a_test() -> None:
    assert list(PROMISES) == [f"P{number}" for number in range(1, 26)]
    assert [promise for promise, row in PROMISES.items() if not re.search(r"`tests/[\w/]+\.py:\w+`", row)] == []


@pytest.mark.parametrize(("file", "name"), REFERENCES, ids=":".join)
def test_named_test_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file(), f"{file} does not exist"
    assert name in defined_names(ROOT / file), f"{file} has no {name}"


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).is_file()] == []
