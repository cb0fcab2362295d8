"""From a model's name to a folder on this machine: `demo`, a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ModelImpl
from engine.errors import EngineError, InvalidCheckpoint, UnsupportedModel, to_install

if TYPE_CHECKING:
    from engine.models.config import DecoderConfig

_DEMO = Path(__file__).parent.parent / "tandem/demo/model"
"""Files of another package, in a checkout and in site-packages."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
"""The files of a checkpoint. Pickled weights (*.bin, *.pt) are never fetched or loaded."""
_NOT_NEEDED = ["consolidated*", "[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "add[!i]*/*"]
"""Among them: the same weights once more, in another form, and subfolders but for additional_chat_templates."""
_OF_ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM, AutoTokenizer; '
    "[kind.from_pretrained('{model}').save_pretrained('converted') for kind in (AutoModelForCausalLM, AutoTokenizer)]"
    '", then give --model converted'
)


class ModelNotFound(EngineError):
    """There is no checkpoint of that name; the message says what to give."""


def resolve(model: str, revision: str | None = None) -> Path:
    """The folder of `model`: "demo", a local folder with a config.json, or owner/name on the Hugging Face hub, there at
    `revision`: a branch, tag or commit; None: main.

    The hub is used only if there is no such folder. Files that its local cache has are not fetched again; without a
    network the cache is used alone.
    """
    folder = _DEMO if model == "demo" else Path(os.path.expanduser(model)).resolve()  # Path's raises for unknown users
    if not folder.is_dir():
        if not _HUB_ID.fullmatch(model) or model.startswith((".", "/", "~")):
            raise ModelNotFound(
                f"model {model!r}: there is no such folder, and it is not an id of the form owner/name; "
                "give a folder with config.json and *.safetensors, a hub id like Qwen/Qwen3-0.6B, or demo"
            )
        folder = _download(model, revision)
    _check_readable(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"model: {folder} has no config.json; give the folder of a checkpoint")
    return folder


def resolve_adapter(adapter: str) -> Path:
    """The folder of a LoRA adapter: a local one, or owner/name on the Hugging Face hub. What it has is read later."""
    folder = Path(os.path.expanduser(adapter)).resolve()
    if folder.is_dir() or not _HUB_ID.fullmatch(adapter) or adapter.startswith("."):
        return folder
    return _download(adapter, None, "adapter", _OF_ADAPTER)


def _check_readable(folder: Path) -> None:
    files = (file for pattern in _NEEDED for file in folder.glob(pattern))
    for path, mode in ((folder, os.R_OK | os.X_OK), *((file, os.R_OK) for file in files)):
        if not os.access(path, mode):
            raise ModelNotFound(f"model: this user cannot read {path}; the owner allows it with chmod -R a+rX {folder}")


def check_checkpoint(
    model: str, folder: Path, *, model_impl: ModelImpl = "auto", needs_weights: bool = True
) -> DecoderConfig:
    """The shape of `model` in `folder`, from its config.json alone.

    Raises UnsupportedModel or InvalidCheckpoint, which say what to do, for one that an instance could not load.
    """
    from engine.models import read_config

    try:
        config = read_config(folder, model_impl)
    except UnsupportedModel as error:
        hint = ". vLLM runs more models: --engine vllm, docs/vllm.md" if "is not supported" in str(error) else ""
        raise UnsupportedModel(f"model {model!r}: {error}{hint}") from None
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise InvalidCheckpoint(
            f"model {model!r} has no *.safetensors in {folder}, and other formats (*.bin, *.pt) are never loaded. "
            f"Convert it to safetensors: {_CONVERT.format(model=model)}"
        )
    return config


def display_name(model: str) -> str:
    """The name of `model` for messages."""
    return "the demo model" if model == "demo" else Path(model).name if Path(model).is_dir() else model


def _download(model: str, revision: str | None, kind: str = "model", patterns: Sequence[str] = _NEEDED) -> Path:
    """The folder of the `kind` called `model` in the hub's local cache, with the files that match `patterns`."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelNotFound(
            f"{kind} {model!r}: there is no such folder here, and fetching it from the hub needs a package: "
            + to_install("hub")
        ) from None
    try:
        return Path(
            hub.snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED)
        )
    except Exception as error:  # the hub's network, permission and lookup errors have no common base
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFound(
            f"{kind} {model!r} could not be fetched from the Hugging Face hub: {reason}; "
            "check the name and the network (and HF_TOKEN for a private one), or give a folder"
        ) from error
