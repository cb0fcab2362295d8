"""docs/api.md is what the protos say: all on the wire with its comment, rpcs with statuses, links that lead on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, SourceCodeInfo

from protos import reference
from protos.tandem.v1 import (
    common_pb2,
    decode_pb2,
    generation_pb2,
    instance_pb2,
    kv_transfer_pb2,
    pools_pb2,
    prefill_pb2,
    stack_pb2,
)
from protos.vllm.grpc.engine import vllm_engine_pb2
from serving.errors import ServiceError

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        *(common_pb2, decode_pb2, generation_pb2, instance_pb2, kv_transfer_pb2),
        *(pools_pb2, prefill_pb2, stack_pb2, vllm_engine_pb2),
    )
]
PAGE = reference.PAGE.read_text()


def section(full_name: str) -> str:
    """What the page says of one message, enum or service."""
    _, _, rest = PAGE.partition(f'<a id="{full_name}"></a>')
    assert rest, f"{full_name} is not on the page"
    return rest.partition('<a id="')[0]


def messages(descriptor: FileDescriptor | Descriptor) -> Iterator[Descriptor]:
    below = (
        descriptor.message_types_by_name if isinstance(descriptor, FileDescriptor) else descriptor.nested_types_by_name
    )
    for message in below.values():
        if not message.GetOptions().map_entry:
            yield message
            yield from messages(message)


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types_by_name.values()


def test_the_page_is_what_the_protos_say_now() -> None:
    assert reference.reference(reference.described()) == PAGE, "run `make protos`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_everything_on_the_wire_is_on_the_page(file: FileDescriptor) -> None:
    for message in messages(file):
        rows = re.findall(r"^\| `(\w+)` \| (\d+) \| \S.* \| \S.* \|$", section(message.full_name), re.MULTILINE)
        assert rows == [(field.name, str(field.number)) for field in message.fields]
    for enum in enums(file):
        rows = re.findall(r"^\| `(\w+)` \| (\d+) \| \S.* \|$", section(enum.full_name), re.MULTILINE)
        assert rows == [(value.name, str(value.number)) for value in enum.values]
    for service in file.services_by_name.values():
        rpcs = re.findall(rf"^#### {service.name}\.(\w+)$", section(service.full_name), re.MULTILINE)
        assert rpcs == [method.name for method in service.methods]


def test_types_are_told_as_a_reader_needs_them() -> None:
    def type_of(message: str, field: str) -> str:
        [documented] = re.findall(rf"^\| `{field}` \| \d+ \| (.*?) \| ", section(message), re.MULTILINE)
        return str(documented)

    assert type_of("tandem.v1.SamplingParams", "logit_bias") == "map of int64 to double"
    assert type_of("tandem.v1.SamplingParams", "temperature") == "optional double"
    assert type_of("tandem.v1.SamplingParams", "stop") == "repeated string"
    assert type_of("tandem.v1.GenerateRequest", "chat") == "[Chat](#tandem.v1.Chat)"
    assert type_of("tandem.v1.DecodeRequest", "seed") == "[DecodeSeed](#tandem.v1.DecodeSeed), one of message"
    assert (
        "stream [DecodeRequest](#tandem.v1.DecodeRequest) → stream [DecodeResponse](#tandem.v1.DecodeResponse)" in PAGE
    )


def test_every_link_leads_somewhere() -> None:
    places = set(re.findall(r'<a id="([\w.]+)"></a>', PAGE)) | {"tandemv1commonproto"}
    assert "\n## tandem/v1/common.proto\n" in PAGE
    assert set(re.findall(r"\]\(#([\w.]+)\)", PAGE)) <= places
    for linked in re.findall(r"\]\(([^#)]+)\)", PAGE):
        assert (reference.PAGE.parent / linked).is_file()


def codes(error: type[ServiceError]) -> set[str]:
    return {error.code.name}.union(*map(codes, error.__subclasses__()))


def test_statuses_are_those_that_services_answer() -> None:
    """Written as `- STATUS: when`; a list may share one line's reason."""
    documented = re.findall(r"^- ((?:[A-Z_]+(?:, )?)+): \S", PAGE, re.MULTILINE)
    named = {name for names in documented for name in names.split(", ")}
    assert named <= codes(ServiceError)
    assert named <= {code.name for code in grpc.StatusCode}
    common = PAGE.partition("\n## tandem/v1/common.proto\n")[2].partition('<a id="')[0]
    for name in ("INVALID_ARGUMENT", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INTERNAL"):
        assert f"\n- {name}: " in common


def tiny(*commented: tuple[list[int], str]) -> FileDescriptorProto:
    """One message with one field, and comments by position."""
    return FileDescriptorProto(
        name="tiny.proto",
        package="tiny",
        message_type=[
            DescriptorProto(
                name="M", field=[FieldDescriptorProto(name="x", number=1, type=FieldDescriptorProto.TYPE_INT64)]
            )
        ],
        source_code_info=SourceCodeInfo(
            location=[SourceCodeInfo.Location(path=path, leading_comments=text) for path, text in commented]
        ),
    )


def test_a_comment_stays_in_its_cell() -> None:
    page = reference.reference([tiny(([12], " File."), ([4, 0], " Message."), ([4, 0, 2, 0], " a | b,\n c.\n"))])
    assert "\n| `x` | 1 | int64 | a \\| b, c. |\n" in page


def test_what_has_no_comment_is_an_error() -> None:
    with pytest.raises(KeyError):
        reference.reference([tiny(([12], " File."), ([4, 0], " Message."))])


def test_a_stale_page_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    reference.main()
    page = tmp_path / "api.md"
    monkeypatch.setattr(reference, "PAGE", page)
    with pytest.raises(SystemExit, match="make protos"):
        reference.main()
    page.write_text(PAGE.replace("default 1", "default 2", 1))
    with pytest.raises(SystemExit, match="stale"):
        reference.main()
    monkeypatch.setattr(sys, "argv", ["reference"])
    reference.main()
    assert page.read_text() == PAGE
