"""From a model's name to a folder on this machine: `demo`, a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tandem.demo import MODEL_DIR

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
"""Files of a checkpoint that are read here. Pickled weights (*.bin, *.pt) are never fetched and never loaded."""


class ModelNotFound(Exception):
    """The name leads to no checkpoint; the message says what would."""


def resolve(model: str) -> Path:
    """The folder of `model`: "demo", a local folder with a config.json, or owner/name on the Hugging Face hub.

    The hub is asked only if there is no such folder; what it has sent before is taken from its cache.
    """
    if model == "demo":
        return checkpoint(MODEL_DIR)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return checkpoint(folder.resolve())
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "/", "~")):
        return checkpoint(_download(model))
    raise ModelNotFound(
        f"model {model!r}: there is no such folder, and it is not an id of the form owner/name; "
        "give a folder with config.json and *.safetensors, a hub id like Qwen/Qwen3-0.6B, or demo"
    )


def checkpoint(folder: Path) -> Path:
    """`folder`, if it looks like a checkpoint; raises ModelNotFound that names what is missing."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a checkpoint in Hugging Face's form")
    return folder


def display_name(model: str) -> str:
    """How a person calls `model`."""
    return "the demo model" if model == "demo" else Path(model).name if Path(model).is_dir() else model


def _download(model: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelNotFound(
            f"model {model!r}: there is no such folder here, and fetching it from the hub needs a package: "
            "pip install '.[hub]'"
        ) from None
    try:
        return Path(hub.snapshot_download(model, allow_patterns=_NEEDED))
    except Exception as error:  # the hub's own tree of network, permission and lookup errors has no one root
        reason = str(error).strip().splitlines()
        raise ModelNotFound(
            f"model {model!r} could not be fetched from the Hugging Face hub: {reason[0] if reason else type(error)}"
        ) from error
