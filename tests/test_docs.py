"""The pages: links and anchors resolve, commands exist with their options, quoted messages are in the code."""

from __future__ import annotations

import importlib
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from tandem.cli import main as tandem
from tools.site import ROOT, links, pages

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
NOT_OF_THE_ENGINE = (
    "engine/vllm_names.py", "engine/attention/cpu.py", "tandem/bench/transfer/media.py", "tandem/commands/doctor.py",
)  # fmt: skip
"""These name devices and do not run on a GPU."""
SERVICES = ("router", "prefill_service", "decode_service")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_OURS = re.compile(rf"(^|[\s/])(tandem|python -m ({'|'.join(SERVICES)})) ")
_ENDS = {"|", "||", "&&", "&", ";", ">"}
_CONSOLE = re.compile(r"^```(?:console|bash|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: the second of two equal ones gets -1."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", page.read_text()))
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_and_anchors_resolve(name: str) -> None:
    page = PAGES[name]
    own = [(page, anchor) for anchor in re.findall(r"\]\(#([^)\s]+)\)", _FENCE.sub("", page.read_text()))]
    for target, anchor in [*links(page), *own]:
        assert target.is_file(), f"{name}: {target.relative_to(ROOT)} is no file"
        assert not anchor or anchor in anchors(target), f"{name}: {target.name} has no heading #{anchor}"


def test_every_module_with_a_line_for_cuda_alone_is_in_the_table_of_gpus() -> None:
    """Or with a branch for devices: by its own name, or by that of its folder."""
    text = PAGES["docs/gpu.md"].read_text()
    packages = ("engine", "kv_transfer", "instance", "serving", "tandem", "vllm_engine")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    for_devices = re.compile(r'cuda\b|"cuda|vram|device\.type')
    found = [path.relative_to(ROOT) for path in modules if for_devices.search(path.read_text().lower())]
    assert len(found) > 10
    missing = {str(path) for path in found if not (f"`{path}`" in text or f"`{path.parent}`" in text)}
    assert missing <= set(NOT_OF_THE_ENGINE), f"docs/gpu.md does not name {missing - set(NOT_OF_THE_ENGINE)}"


def test_examples_in_python_find_the_stack_of_this_machine_by_themselves() -> None:
    """`tandem up` chooses a port that is free."""
    assert not [name for name, page in PAGES.items() if re.search(r"Client\(\"(127|localhost)", page.read_text())]


def commands(text: str, wanted: re.Pattern[str] = _OURS) -> Iterator[list[str]]:
    """The words of each shell command in a page's console blocks, of lines with `wanted`; where a block has prompts,
    the rest is output. Two spaces begin an explanation, as in the commands' help."""
    for block in _CONSOLE.findall(text):
        lines = [re.split(r" {2,}", line.strip())[0] for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in prompted or lines:
            if not wanted.search(line):
                continue
            words = shlex.split(line, comments=True)
            while words:
                end = next((index for index, word in enumerate(words) if word in _ENDS), len(words))
                yield words[:end]
                words = words[end + 1 :]


def ours(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """The click command and its arguments, if `words` call one of this project."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words and Path(words[0]).name == "tandem":
        return tandem, words[1:]
    if len(words) > 2 and Path(words[0]).name == "python" and words[1] == "-m" and words[2] in SERVICES:
        return importlib.import_module(f"{words[2]}.__main__").main, words[3:]
    return None


def check(command: click.Command, args: list[str]) -> None:
    """Raises UsageError for what click would reject: unknown commands and options, wrong values. Runs nothing."""
    context = click.Context(command, info_name=command.name, resilient_parsing=False)
    values, rest, _ = command.make_parser(context).parse_args(list(args))
    for one in command.params:
        value = values.get(one.name or "")
        if isinstance(value, str | tuple | list) and not isinstance(one.type, click.Path) and value != ():
            one.type_cast_value(context, value)
    if isinstance(command, click.Group) and rest:
        name, below, args = command.resolve_command(context, rest)
        assert below is not None, name
        check(below, args)


def called() -> Iterator[tuple[str, list[str]]]:
    for name, page in PAGES.items():
        for words in commands(page.read_text()):
            if ours(words) is not None:
                yield name, words


CALLED = list(called())


@pytest.mark.parametrize(("name", "words"), CALLED, ids=[f"{name}: {shlex.join(words)}" for name, words in CALLED])
def test_a_command_parses(name: str, words: list[str]) -> None:
    found = ours(words)
    assert found is not None
    check(*found)


def test_the_commands_of_the_pages_are_found() -> None:
    assert len(CALLED) > 100
    with pytest.raises(click.UsageError, match="--prefil"):
        check(tandem, ["up", "--prefil", "2"])
    with pytest.raises(click.UsageError):
        check(tandem, ["up", "--disaggregation", "sometimes"])
    with pytest.raises(click.UsageError):
        check(tandem, ["pools", "resise", "decode=2"])


@cache
def sources() -> str:
    """The code, with string literals that follow each other joined."""
    folders = ("engine", "kv_transfer", "serving", "instance", "router", "tandem")
    files = [ROOT / "Makefile", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]
    return re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(path.read_text() for path in files))


QUOTED = re.findall(r"^### (.+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("heading", QUOTED)
def test_a_quoted_message_is_one_of_the_code(heading: str) -> None:
    for message in re.findall(r"`([^`]+)`", heading):
        for part in filter(None, map(str.strip, message.split("…"))):
            assert len(part) < 6 or part in sources(), part


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/object/apply:pymdownx.slugs.slugify", "")

    def listed(nav: object) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        elif isinstance(nav, dict):
            yield from listed(list(nav.values()))
        elif isinstance(nav, list):
            for one in nav:
                yield from listed(one)

    found = set(listed(yaml.safe_load(text)["nav"]))
    assert found <= PAGES.keys()
    own = {name for name in PAGES if name.startswith("docs/") and not name.startswith("docs/decisions/0")}
    assert own - found == set(), "add it to `nav` in mkdocs.yml"
