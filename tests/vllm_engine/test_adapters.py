"""Adapters beside names in the place of vLLM's. What vLLM itself computes with them is tested in tests/vllm."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
import torch

from engine.adapter_config import CONFIG, WEIGHTS
from engine.errors import CheckpointChanged, EngineError, InvalidCheckpoint, UnsupportedModel
from tandem.demo import MODEL_DIR as DEMO
from tests.builders import write_adapter
from tests.instance.scripted_core import INFO

Q, K, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qko")


class _Request(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str


@pytest.fixture
def module(names_of_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = importlib.import_module("vllm_engine.adapters")
    monkeypatch.setattr(found, "MaxLoRARanks", Literal[1, 8, 16])
    monkeypatch.setattr(found, "LoRARequest", _Request)
    monkeypatch.setattr(found, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    return found


def adapter(folder: Path, **config: Any) -> str:
    return str(write_adapter(folder, DEMO, modules=["q_proj"], **config))


def test_the_arguments_come_from_the_adapters(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU one slot stays empty."""
    assert module.adapter_arguments({}) == {}
    folders = {"a": adapter(tmp_path / "a", r=2), "b": adapter(tmp_path / "b", r=4, rank_pattern={"layers.0": 9})}
    assert module.adapter_arguments(folders) == {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    assert module.adapter_arguments({"a": folders["a"]})["max_lora_rank"] == 8
    monkeypatch.setattr(module.current_platform, "is_cpu", lambda: False)
    assert module.adapter_arguments(folders)["max_loras"] == 2


def test_what_vllm_has_no_rank_for_is_named(module: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="adapter 'sql': its rank is 17; vLLM takes at most 16"):
        module.adapter_arguments({"sql": adapter(tmp_path / "a", r=17), "b": adapter(tmp_path / "b", r=1)})
    with pytest.raises(UnsupportedModel, match=r"adapter 'sql': adapter_config\.json: use_dora True is not supported"):
        module.adapter_arguments({"sql": adapter(tmp_path / "c", use_dora=True)})


def layer(down: tuple[int, ...] | None, up: tuple[int, ...] | None, rank: int = 4) -> Any:
    made = [None if shape is None else torch.ones(shape) for shape in (down, up)]
    return SimpleNamespace(lora_a=made[0], lora_b=made[1], rank=rank, scaling=2.0)


def manager(tp_size: int = 1) -> Any:
    """q and k are merged: 64 inputs, 128 and 32 outputs; o is alone, and an embedding has its matrices otherwise."""
    downs, ups = torch.zeros(3, 1, 8, 64), (torch.zeros(3, 1, 128, 8), torch.zeros(3, 1, 32, 8))
    modules = {
        "model.layers.0.self_attn.qkv_proj": SimpleNamespace(
            lora_a_stacked=(downs, downs), lora_b_stacked=ups, tp_size=tp_size
        ),
        OUT: SimpleNamespace(lora_a_stacked=(downs,), lora_b_stacked=ups[:1], tp_size=tp_size),
        "model.embed_tokens": SimpleNamespace(lora_a_stacked=downs),
    }
    return SimpleNamespace(modules=modules, packed_modules={"model.layers.0.self_attn.qkv_proj": [Q, K]})


def test_layers_that_fit_are_taken_and_absent_ones_are_listed(module: Any) -> None:
    fitting = {Q: layer((4, 64), (128, 4)), K: layer((2, 64), (32, 2), rank=2), OUT: layer((4, 64), (128, 4))}
    assert module._check(fitting, manager()) == []
    other = {"model.layers.9.q_proj": layer((1, 1), (1, 1)), "model.embed_tokens": layer((4, 500), (60, 4))}
    assert module._check(other, manager()) == ["model.layers.9.q_proj"]
    assert module._check({Q: layer((4, 64), (256, 4))}, manager(tp_size=2)) == []  # each rank has a part


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "has no tensors"),
        ({Q: layer((4, 64), None)}, "q_proj' has an A or a B alone"),
        ({Q: layer((4, 32), (128, 4))}, r"q_proj' has A of shape \[4, 32\] .* require \[4, 64\] and \[128, 4\]"),
        ({K: layer((4, 64), (128, 4))}, r"k_proj' has .* B of \[128, 4\]; .* require \[4, 64\] and \[32, 4\]"),
        ({OUT: layer((4, 64), (128, 4), rank=8)}, r"o_proj' .* the rank of the adapter's config require \[8, 64\] and"),
        ({"model.embed_tokens": layer((4, 500), (60, 3))}, r"embed_tokens' .* require \[4, 500\] and \[60, 4\]"),
    ],
)
def test_tensors_of_which_vllm_would_use_a_part_are_refused(module: Any, layers: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        module._check(layers, manager())


def test_numbers_that_are_not_finite_are_refused(module: Any) -> None:
    """Also those that are not after vLLM has scaled them."""
    for number in (torch.inf, 3e38):
        broken = layer((4, 64), (128, 4))
        broken.lora_b[3, 2] = number
        with pytest.raises(InvalidCheckpoint, match=r"q_proj' has numbers that are not finite torch.float32"):
            module._check({Q: broken}, manager())


def test_a_worker_returns_what_is_wrong(module: Any) -> None:
    """vLLM's own error, or what the check has found; only then nothing is loaded."""
    loaded: list[_Request] = []
    adapter = _Request("sql", 1, "/sql")
    loader = SimpleNamespace(_adapter_manager=manager(), _load_adapter=lambda _: SimpleNamespace(loras={}))
    runner = SimpleNamespace(lora_manager=loader, add_lora=loaded.append)
    assert module.add_adapter(runner, adapter) == ("it has no tensors", [])
    loader._load_adapter = lambda _: next(iter(()))
    assert module.add_adapter(runner, adapter) == ("StopIteration()", [])
    assert not loaded
    loader._load_adapter = lambda _: SimpleNamespace(loras={OUT: layer((4, 64), (128, 4)), "x": layer((1, 1), (1, 1))})
    assert module.add_adapter(runner, adapter) == ("", ["x"])
    assert loaded == [adapter]


class _Vllm:
    """Its workers answer as given."""

    def __init__(self, *answers: tuple[str, list[str]], meanwhile: Callable[[], object] = lambda: None) -> None:
        self.answers = answers
        self.meanwhile = meanwhile
        self.calls: list[tuple[Any, ...]] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == "tandem_add_adapter"
        self.calls.append(args)
        self.meanwhile()
        return [*self.answers]


async def test_adapters_become_part_of_the_identity(module: Any, tmp_path: Path) -> None:
    """Each worker of a pipeline has some of the layers."""
    folders = {"sql": adapter(tmp_path / "sql"), "poet": adapter(tmp_path / "poet", seed=1)}
    vllm = _Vllm(("", ["layer 0"]), ("", ["layer 1"]))
    info = await module.load_adapters(folders, vllm, INFO)
    assert vllm.calls == [("poet", 1, folders["poet"]), ("sql", 2, folders["sql"])]
    assert info.model_identity == INFO.model_identity.with_adapters(folders) != INFO.model_identity
    assert info == msgspec.structs.replace(INFO, model_identity=info.model_identity, lora_adapters=["poet", "sql"])
    assert await module.load_adapters({}, vllm, INFO) == INFO


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([("", []), ("it has no tensors", [])], "adapter 'sql': vLLM cannot use it: it has no tensors"),
        ([("", ["b", "a"]), ("", ["a"])], "vLLM cannot use it: the model has no layer 'a' that takes one"),
    ],
)
async def test_what_a_worker_cannot_use_is_one_error(
    module: Any, tmp_path: Path, answers: list[tuple[str, list[str]]], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await module.load_adapters({"sql": adapter(tmp_path / "sql")}, _Vllm(*answers), INFO)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
async def test_an_adapter_that_changes_while_it_is_loaded_is_noticed(module: Any, tmp_path: Path, name: str) -> None:
    file = Path(adapter(tmp_path / "sql")) / name
    vllm = _Vllm(("", []), meanwhile=lambda: file.write_bytes(file.read_bytes() + b" "))
    with pytest.raises(CheckpointChanged, match=name):
        await module.load_adapters({"sql": str(file.parent)}, vllm, INFO)
