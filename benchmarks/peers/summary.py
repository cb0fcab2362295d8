"""benchmarks/RESULTS.md: how the ratios compare from one processor to another, read from the pages in results/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import page

RESULTS = Path(__file__).resolve().parents[1] / "RESULTS.md"
PAGES = RESULTS.with_name("results")
RATIO = "vLLM / Tandem"
TITLE = "# Tandem beside vLLM: "


def update(summary: Path = RESULTS, pages: Path = PAGES) -> None:
    """Puts the ratios of all pages between the markers of `summary`."""
    texts = {path: path.read_text() for path in sorted(pages.glob("*.md"))}
    ratios = [dict(_ratios(text)) for text in texts.values()]
    works = dict.fromkeys(work for found in sorted(ratios, key=len, reverse=True) for work in found)
    links = [f"[{_title(text)}]({path.relative_to(summary.parent)})" for path, text in texts.items()]
    rows = [(*work, *(found.get(work, "") for found in ratios)) for work in works]
    measured = ("", "measured", *(_date(text) for text in texts.values()))
    page.fill(summary, "ratios", page.table(("shape", "work", *links), [measured, *rows]))


def _ratios(text: str) -> Iterator[tuple[tuple[str, str], str]]:
    """((shape, work), ratio) of the rows of each table that has a column of ratios."""
    head: Sequence[str] = ()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or not head:
            head = cells
        elif RATIO in head and not cells[0].startswith("---"):
            yield (cells[0], cells[1]), cells[head.index(RATIO)]


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix(TITLE)


def _date(text: str) -> str:
    """The page's first paragraph begins with `page.origin`."""
    return text.split("\n\n", 2)[1][: len("2026-01-01")]
