"""The docs as a site: `make docs` builds it into build/site.

The pages' links are relative in the repository, so the site's source has the repository's layout: every page, and every
file that one links to, copied into build/site_source. MkDocs then checks each link and anchor (mkdocs.yml, strict).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build/site_source"
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def pages(root: Path = ROOT) -> list[Path]:
    """Every page of the repository, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return sorted(root / name for name in listed.stdout.split())


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The relative links of a page outside of code: the file, and the anchor without its #."""
    for target, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        yield (page.parent / target).resolve(), anchor.removeprefix("#")


def stage(source: Path = SOURCE) -> None:
    """Copies the pages and the files that they link to into `source`, which is emptied first."""
    shutil.rmtree(source, ignore_errors=True)
    found = {target for page in pages() for target, _ in links(page) if target.is_file()}
    for path in {*pages(), *found}:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def main() -> None:
    stage()
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    status = subprocess.run(build, cwd=ROOT, env=quiet, check=False).returncode
    if status:
        raise SystemExit(status)
    print("the site is in build/site; to read it with its search: python -m http.server --directory build/site")


if __name__ == "__main__":
    main()
