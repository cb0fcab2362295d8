"""The wire contract keeps what it has: peers of two versions run side by side during an update.

tests/data/wire.txt has a line for each field, enum value and rpc of tandem.v1. A new one is added to it, in the commit
that adds it to the protos. A line of a released version is neither changed nor removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

RECORDED = Path(__file__).parents[1] / "data/wire.txt"
PROTOS = Path(__file__).parents[2] / "protos/tandem/v1"


def of_message(message: Descriptor) -> Iterator[str]:
    wire = DescriptorProto()
    message.CopyToProto(wire)
    for field in wire.field:
        kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        yield f"{message.full_name}.{field.name} = {field.number}: {presence(field, wire)} {kind}"
    for inner in message.nested_types:
        yield from of_message(inner)
    for enum in message.enum_types:
        yield from of_enum(enum)


def presence(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """What tells whether it is there: of a singular one, its value alone."""
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "repeated"
    if field.proto3_optional:
        return "optional"
    return f"oneof {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else "singular"


def of_enum(enum: EnumDescriptor) -> Iterator[str]:
    return (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)


def of_file(file: FileDescriptor) -> Iterator[str]:
    for message in file.message_types_by_name.values():
        yield from of_message(message)
    for enum in file.enum_types_by_name.values():
        yield from of_enum(enum)
    for service in file.services_by_name.values():
        for method in service.methods:
            request = f"{'stream ' * method.client_streaming}{method.input_type.name}"
            yield f"{method.full_name}({request}) -> {'stream ' * method.server_streaming}{method.output_type.name}"


def test_every_field_value_and_rpc_keeps_its_name_number_and_type() -> None:
    modules = [import_module(f"protos.tandem.v1.{path.stem}_pb2") for path in sorted(PROTOS.glob("*.proto"))]
    present = {line for module in modules for line in of_file(module.DESCRIPTOR)}
    recorded = set(RECORDED.read_text().splitlines())
    assert not recorded - present, "older peers still send and read these"
    assert not present - recorded, f"add these lines to {RECORDED.name}"
