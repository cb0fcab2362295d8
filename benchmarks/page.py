"""Figures into prose: Markdown tables between markers that a page keeps ready for them.

<!-- figures: pool_sizes -->
… replaced as a whole …
<!-- end of figures: pool_sizes -->
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.bench.serve.report import machine

DOCS = Path(__file__).resolve().parents[1] / "docs"
TUNING = DOCS / "tuning.md"
PLOTS = DOCS / "plots"
LOG = Path(__file__).resolve().parent / "LOG.md"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def fill(path: Path, name: str, markdown: str) -> None:
    """Puts `markdown` between the markers of `name`; raises ValueError where the page has none."""
    begin, end = f"<!-- figures: {name} -->\n", f"<!-- end of figures: {name} -->\n"
    text = path.read_text()
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(
            f"{path} has no place for the figures of {name}: a line {begin.strip()} and a line {end.strip()}"
        )
    path.write_text(f"{before}{begin}\n{markdown.strip()}\n\n{end}{after}")


def log(measured_on: str, title: str, markdown: str) -> None:
    """Puts a section on top of benchmarks/LOG.md; `measured_on` is from `origin`, called before the measurement."""
    text = LOG.read_text()
    place = text.index("\n## ") + 1
    section = f"## {measured_on}\n\n### {title}\n\n{markdown.strip()}\n\n"
    LOG.write_text(text[:place] + section + text[place:])


def origin() -> str:
    """Time, machine and its load; to be called before the measurement."""
    found = machine()
    return (
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC · {found['cores']} cores ({found['cpu']}), "
        f"{found['memory_bytes'] / (1 << 30):.0f} GiB, load {os.getloadavg()[0]:.1f}"
    )


def save_plot(name: str, picture: bytes, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(picture)
    return path
