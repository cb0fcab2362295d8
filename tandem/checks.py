"""What `tandem doctor` looks at. Each check is a function that yields findings; none of them changes anything.

A finding is ok, warn (it works, with less) or fail (it does not), and says what to do unless it is ok.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.machine import available_bytes, cpu_quota, usable_cores
from tandem.models import ModelNotFound, display_name, resolve
from tandem.running import temporary_folder

_PR_GET_PDEATHSIG = 2
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHM = 64 << 20
_PACKAGES = (
    "torch", "numpy", "numba", "safetensors", "tokenizers", "jinja2",
    "grpcio", "protobuf", "pyzmq", "msgspec", "pydantic", "blake3", "psutil", "click",
)  # fmt: skip
_EXTRAS = (
    ("huggingface_hub", "models by name from the Hugging Face hub", "pip install '.[hub]'"),
    ("nixl", "the nixl connector (memory to memory, RDMA, NVLink)", "pip install '.[nixl]'"),
    ("lmcache", "the lmcache connector (LMCache's disk format, its server)", "pip install '.[lmcache]'"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report. `remedy` is what to type or change."""

    verdict: Literal["ok", "warn", "fail"]
    subject: str
    what: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def python() -> Iterator[Finding]:
    """Version and platform."""
    version = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036 - somebody may run it from the sources all the same
        yield Finding("fail", "python", version, "use Python 3.11 or newer")
    else:
        yield Finding("ok", "python", f"{version} on {platform.system()} {platform.machine()}")


def packages() -> Iterator[Finding]:
    """What Tandem needs, with versions, without importing any of it."""
    versions = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield Finding("fail", "packages", f"missing: {', '.join(missing)}", "make install")
    yield Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))


def extras() -> Iterator[Finding]:
    """What is optional."""
    for module, purpose, install in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield Finding("warn", module, f"not installed; only needed for {purpose}", install)
        else:
            yield Finding("ok", module, f"{_version(module.replace('_', '-')) or 'installed'}, for {purpose}")


def machine() -> Iterator[Finding]:
    """Cores and memory."""
    cores, quota = usable_cores(), cpu_quota()
    text = f"{len(cores)} usable" + (f", of which the container grants {quota:g}" if quota is not None else "")
    if len(cores) < 2 or (quota is not None and quota < 2):
        yield Finding("warn", "cores", text, "with fewer than two, prefill and decode take turns; tandem up --no-pin")
    else:
        yield Finding("ok", "cores", text)
    available = available_bytes()
    text = f"{available / 2**30:.1f} GiB free"
    if available < _LITTLE_MEMORY:
        yield Finding("warn", "memory", text, "keep --kv-memory small, or free some")
    else:
        yield Finding("ok", "memory", text)


def kernel() -> Iterator[Finding]:
    """What the processes of a stack ask of the operating system."""
    if _has_death_signal():
        yield Finding("ok", "death signal", "children end with their parent (PR_SET_PDEATHSIG)")
    else:
        yield Finding(
            "warn", "death signal", "not offered by this system", "children watch a pipe instead; nothing to do"
        )
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        yield Finding(
            "warn", "/dev/shm", "not there or not writable", "the nixl connector needs it; mount a tmpfs there"
        )
    elif (free := shutil.disk_usage(shm).free) < _LITTLE_SHM:
        remedy = "the nixl connector wants more; docker run --shm-size=1g"
        yield Finding("warn", "/dev/shm", f"{free >> 20} MiB free", remedy)
    else:
        yield Finding("ok", "/dev/shm", f"{free / 2**30:.1f} GiB free")
    temporary = temporary_folder()
    free = shutil.disk_usage(temporary).free
    verdict: Literal["ok", "warn"] = "ok" if free > _LITTLE_MEMORY else "warn"
    remedy = "" if verdict == "ok" else "the local store lies there; set TMPDIR to a larger disk"
    yield Finding(verdict, "temporary files", f"{temporary}, {free / 2**30:.1f} GiB free", remedy)


def model(name: str) -> Check:
    """Whether the folder of `name` is a checkpoint that the engine can run. Reads its config, not its weights."""

    def check() -> Iterator[Finding]:
        try:
            folder = resolve(name)
        except ModelNotFound as error:
            yield Finding("fail", "model", str(error), "see tandem up --help")
            return
        weights = sorted(folder.glob("*.safetensors"))
        if not weights:
            yield Finding("fail", "model", f"{folder} has no *.safetensors", "only safetensors weights are loaded")
            return
        try:
            from engine.models.config import ModelConfig

            config = ModelConfig.from_folder(folder)
        except Exception as error:  # whatever is wrong with the config is the finding
            yield Finding("fail", "model", f"{display_name(name)}: {error}", "choose a model that is supported")
            return
        num_bytes = sum(path.stat().st_size for path in weights)
        if not (folder / "tokenizer.json").is_file():
            remedy = "clients must send token ids; add the model's tokenizer.json for text"
            yield Finding("warn", "tokenizer", "no tokenizer.json in the folder", remedy)
        size = f"{num_bytes / 2**30:.2f} GiB" if num_bytes > 2**29 else f"{num_bytes / 2**20:.1f} MiB"
        yield Finding(
            "ok", "model", f"{display_name(name)}: {size} of weights, context {config.max_position_embeddings}"
        )

    return check


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_death_signal() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    signum = ctypes.c_int()
    return bool(ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signum), 0, 0, 0) == 0)
