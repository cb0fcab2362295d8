"""Names in the place of vLLM's, for tests of what surrounds it. What vLLM itself does is tested in tests/vllm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Names(ModuleType):
    """Every name is an empty class; an error's is an exception."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base: type = Exception if name.endswith("Error") else object
        found = type(name, (base,), {"__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def names_of_vllm() -> Iterator[None]:
    """Modules of vllm_engine can be imported without vLLM."""
    before, finder = dict(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_engine")]:
            del sys.modules[name]
        sys.modules.update({name: before[name] for name in before if name.startswith("vllm_engine")})
