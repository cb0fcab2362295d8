"""A Dockerfile's steps, performed in a folder in place of an image: enough to see that they fit together.

Paths that a step names with a leading slash lie under the folder. What needs a Docker engine or root is not performed:
pulling the base image, installing its packages, making users, dropping to one.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_OWN_PATHS = re.compile(r"(?<![\w./:])/(src|wheels|opt|models)(?=[/\s\"'):]|$)")
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_NEEDS_ROOT = ("groupadd", "apt-get")


@dataclass(frozen=True)
class Step:
    """One instruction, continuation lines joined."""

    word: str
    rest: str


def steps(text: str) -> Iterator[Step]:
    """Every instruction in order, comments left out."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    for instruction in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = instruction.strip().partition(" ")
        yield Step(word, rest.strip())


def context_files(root: Path, ignore: str) -> list[Path]:
    """What `COPY . .` sees, relative to `root`: .dockerignore's last matching line decides."""
    rules = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    kept = []
    for top in sorted(path.name for path in root.iterdir()):
        if not _ignored(top, rules):
            found = [root / top] if (root / top).is_file() else (root / top).rglob("*")
            kept += [path.relative_to(root) for path in found if path.is_file()]
    return [path for path in kept if not _ignored(path.as_posix(), rules)]


def _ignored(path: str, rules: list[str]) -> bool:
    ignored = False
    parts = path.split("/")
    for rule in rules:
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts)
        else:
            matches = fnmatch.fnmatch(parts[0], pattern)
        ignored = not rule.startswith("!") if matches else ignored
    return ignored


@dataclass
class Build:
    """The image's root folder while the steps of its stages are performed in it, all stages in the same one."""

    root: Path
    context: Path
    environment: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    directory: Path = Path("/")
    settings: dict[str, str] = field(default_factory=dict)
    """The last USER, CMD and EXPOSE."""
    skipped: list[str] = field(default_factory=list)

    def perform(self, step: Step) -> None:
        """Raises CalledProcessError with what the step said, ValueError for an instruction that is not known here."""
        rest = _REFERENCE.sub(lambda found: {**self.environment, **self.arguments}.get(found[1], found[0]), step.rest)
        match step.word:
            case "ARG":
                name, _, default = rest.partition("=")
                self.arguments.setdefault(name, default)
            case "ENV":
                self.environment |= dict(pair.split("=", 1) for pair in self._own(rest).split())
            case "WORKDIR":
                self.directory = self.root / rest.lstrip("/")
                self.directory.mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(rest.split())
            case "RUN":
                self._run(rest)
            case "USER" | "CMD" | "EXPOSE":
                self.settings[step.word] = rest
            case "FROM":
                self.directory = self.root
            case _:
                raise ValueError(f"{step.word} is not performed here")

    def _own(self, text: str) -> str:
        return _OWN_PATHS.sub(lambda found: f"{self.root}{found[0]}", text)

    def _copy(self, words: list[str]) -> None:
        if words[0].startswith("--from="):
            assert words[1] == words[2], "stages share one folder here: copied to where it was"
            return
        seen = context_files(self.context, (self.context / ".dockerignore").read_text())
        wanted = seen if words[0] == "." else [path for path in seen if path.as_posix() in words[:-1]]
        assert wanted, f"COPY {' '.join(words)}: .dockerignore leaves nothing of it"
        for path in wanted:
            target = self.directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.context / path, target)

    def _run(self, command: str) -> None:
        if command.startswith(_NEEDS_ROOT):
            self.skipped.append(command)
            return
        subprocess.run(
            ["sh", "-euc", self._own(command)],
            cwd=self.directory,
            env={**os.environ, **self.environment},
            check=True,
            timeout=300,
        )
