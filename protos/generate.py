"""Generates the Python stubs beside the protos: `make protos`, or `make check` with --check.

The protos' packages are `tandem.v1` and those of vLLM, KEDA and Envoy, and buf's module root is this folder, so
protoc writes `from tandem.v1 import …`. The repository has a package called `tandem` of its own, which a stub must
never need: those imports are rewritten to `protos.tandem.v1`, and the others' alike. Left out are each service's class
for calls without a channel, which gRPC calls experimental, and the `_grpc` stubs of a proto without services. Nothing
else of protoc's output is touched; the names in the descriptor pool stay `tandem/v1/…`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGES = (Path("tandem/v1"), Path("vllm/grpc/engine"), Path("externalscaler"), Path("envoy/service/ext_proc/v3"))
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")

# `from tandem.v1 import x`, `import tandem.v1.x` and, in stubs, the qualified name `tandem.v1.x_pb2.Message`.
_NAMES = "|".join(re.escape(".".join(package.parts)) for package in PACKAGES)
_REWRITES = (
    (re.compile(rf"^(\s*from )({_NAMES})(\.\w+)? import ", re.MULTILINE), r"\1protos.\2\3 import "),
    (re.compile(rf"^(\s*import )({_NAMES})\b", re.MULTILINE), r"\1protos.\2"),
    (re.compile(rf"(?<![\w./'\"])({_NAMES})\.(\w+_pb2)\b"), r"protos.\1.\2"),
)
_EXPERIMENTAL = re.compile(
    r"\n\n\n # This class is part of an EXPERIMENTAL API\.\nclass .*?(?=\n\n\nclass |\n\Z)", re.DOTALL
)
"""A service's class for calls without a channel, and the empty lines above it."""


def rewritten(source: str) -> str:
    """`source` with every import of the stubs' package moved below `protos`, and without the experimental classes."""
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    return _EXPERIMENTAL.sub("", source)


def generate(target: Path) -> None:
    """Writes the stubs of every proto below `target`; raises SystemExit where protoc refuses a proto."""
    from grpc_tools import protoc

    protos = sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no protos under {', '.join(map(str, PACKAGES))}")
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=only_async,quiet:{target}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for path in stubs(target):
        source = rewritten(path.read_text())
        if "_pb2_grpc." in path.name and "\nclass " not in source:
            path.unlink()
        else:
            path.write_text(source)


def stubs(root: Path) -> list[Path]:
    """Every generated file below `root`."""
    return sorted(path for package in PACKAGES for path in (root / package).iterdir() if path.name.endswith(SUFFIXES))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the protos' Python stubs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed stub is stale")
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        new = {str(path.relative_to(fresh)): path.read_text() for path in stubs(fresh)}
        old = {str(path.relative_to(ROOT)): path.read_text() for path in stubs(ROOT)}
        stale = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
        if check:
            if stale:
                raise SystemExit(f"stale stubs (run `make protos`): {', '.join(stale)}")
            return
        for name in stale:
            if name in new:
                shutil.copyfile(fresh / name, ROOT / name)
            else:
                (ROOT / name).unlink()
        print(f"{len(new)} stubs, {len(stale)} changed")


if __name__ == "__main__":
    main()
