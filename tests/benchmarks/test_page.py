"""Figures go where a page keeps a place for them, and nothing else of the page changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import page

PAGE = """\
# Title

<!-- figures: one -->

old

<!-- end of figures: one -->

between

<!-- figures: two -->

kept

<!-- end of figures: two -->
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_only_what_is_between_its_markers_is_replaced(path: Path) -> None:
    page.fill(path, "one", "first\n")
    page.fill(path, "one", "new · ≤ \\1 $&")
    assert path.read_text() == PAGE.replace("old", "new · ≤ \\1 $&")


@pytest.mark.parametrize("missing", ["<!-- figures: two -->\n", "<!-- end of figures: two -->\n"])
def test_a_page_without_the_markers_is_unchanged_and_the_error_names_them(path: Path, missing: str) -> None:
    path.write_text(PAGE.replace(missing, ""))
    with pytest.raises(ValueError, match="has no place for the figures of two: a line <!-- figures: two -->"):
        page.fill(path, "two", "new")
    assert path.read_text() == PAGE.replace(missing, "")


@pytest.mark.parametrize("name", ["pool_sizes engines", "pool_sizes stubs", "pd_isolation"])
def test_the_tuning_page_has_a_place_for_every_experiment(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "tuning.md"
    copy.write_text(page.TUNING.read_text())
    page.fill(copy, name, "| a |")
    assert copy.read_text().count("| a |") == 1


def test_the_newest_entry_of_the_log_is_on_top(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("# Log\n\nIntro.\n\n## yesterday\n\nold\n")
    monkeypatch.setattr(page, "LOG", path)
    page.log("today", "Sizes", page.table(("a", "b"), [("1", "2")]))
    expected = "## today\n\n### Sizes\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n## yesterday\n\nold\n"
    assert path.read_text() == f"# Log\n\nIntro.\n\n{expected}"
