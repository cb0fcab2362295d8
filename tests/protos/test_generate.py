"""The stubs have what clients and servers use, and nothing of the other package `tandem`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from protos import generate

GRPC_STUBS = [path.relative_to(generate.ROOT) for path in generate.stubs(generate.ROOT) if "_pb2_grpc.py" in path.name]
SERVICE = """\
class {0}Stub(object):
    pass


class {0}Servicer(object):
    pass


def add_{0}Servicer_to_server(servicer, server):
    server.add_registered_method_handlers('tandem.v1.{0}', rpc_method_handlers)
"""
EXPERIMENTAL = """\


 # This class is part of an EXPERIMENTAL API.
class {0}(object):

    @staticmethod
    def Get(request,
            target):
        return grpc.experimental.unary_unary(request, target)

    @staticmethod
    def List(request,
            target):
        return grpc.experimental.unary_unary(request, target)
"""


@pytest.mark.parametrize("path", [path for path in GRPC_STUBS if path.suffix == ".py"], ids=str)
def test_a_service_has_a_stub_and_a_servicer(path: Path) -> None:
    module = importlib.import_module(".".join(("protos", *path.with_suffix("").parts)))
    classes = {name for name, value in vars(module).items() if isinstance(value, type)}
    services = {name.removesuffix("Stub") for name in classes if name.endswith("Stub")}
    assert services
    assert classes == {service + end for service in services for end in ("Stub", "Servicer")}


@pytest.mark.parametrize("path", [path for path in GRPC_STUBS if path.suffix == ".pyi"], ids=str)
def test_types_are_those_of_the_stubs(path: Path) -> None:
    assert path.with_suffix(".py") in GRPC_STUBS
    named = re.findall(r"^class (\w+)", (generate.ROOT / path).read_text(), re.MULTILINE)
    assert named == re.findall(r"^class (\w+)", (generate.ROOT / path.with_suffix(".py")).read_text(), re.MULTILINE)


def test_an_experimental_class_is_left_out_wherever_it_stands() -> None:
    services = [SERVICE.format(name) for name in ("A", "B")]
    generated = [service + EXPERIMENTAL.format(name) for name, service in zip("AB", services, strict=True)]
    assert generate.rewritten("\n\n".join(generated)) == "\n\n".join(services)


def test_imports_are_below_protos() -> None:
    assert generate.rewritten("from tandem.v1 import x_pb2 as x\n") == "from protos.tandem.v1 import x_pb2 as x\n"
    assert generate.rewritten("import vllm.grpc.engine.x_pb2\n") == "import protos.vllm.grpc.engine.x_pb2\n"
    assert generate.rewritten("x: tandem.v1.x_pb2.Message\n") == "x: protos.tandem.v1.x_pb2.Message\n"
    assert generate.rewritten("'/tandem.v1.x_pb2/Get'\n") == "'/tandem.v1.x_pb2/Get'\n"
