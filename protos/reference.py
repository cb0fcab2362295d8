"""Writes docs/api.md, the reference of the wire contract: `make protos`, or `make check` with --check.

Everything on the page stands in the protos: rpcs, messages, fields with their comments, and in an rpc's comment the
statuses that it may answer, as `- STATUS: when` lines. protoc's descriptors with source positions are what is read.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from protos.generate import PACKAGES, ROOT

PAGE = ROOT.parent / "docs/api.md"
_HEAD = """# API reference

Written by `make protos` from the protos; mend it there. The first service is what a backend calls, over gRPC
([openai.md](openai.md) has the HTTP API); the others are for Tandem's own processes and its operators, and the last are
vLLM's, KEDA's and Envoy's. What every rpc may answer stands [below](#tandemv1commonproto) once. A field without
`optional` that is absent reads as its zero value.
"""
_ORDER = (
    *("generation", "common", "pools", "instance", "prefill", "decode", "kv_transfer", "stack", "signals"),
    "vllm_engine",
)
_FILE, _MESSAGE, _ENUM, _SERVICE = 12, 4, 5, 6
"""Numbers of FileDescriptorProto's own fields: they begin the paths of source positions."""
_FIELD, _NESTED, _NESTED_ENUM, _VALUE, _METHOD = 2, 3, 4, 2, 2

_Position = tuple[int, ...]


def described() -> list[FileDescriptorProto]:
    """The protos with their comments, in the page's order; raises SystemExit where protoc refuses one."""
    paths = [path for package in PACKAGES for path in (ROOT / package).glob("*.proto")]
    paths.sort(key=lambda path: (_ORDER.index(path.stem) if path.stem in _ORDER else len(_ORDER), path.stem))
    with tempfile.NamedTemporaryFile() as out:
        names = [str(path.relative_to(ROOT)) for path in paths]
        options = [f"--proto_path={ROOT}", "--include_source_info", f"--descriptor_set_out={out.name}"]
        # A process of its own: protoc may abort the one it runs in, where other libraries are loaded.
        command = [sys.executable, "-m", "grpc_tools.protoc", *options, *names]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("protoc failed")
        files = {file.name: file for file in FileDescriptorSet.FromString(Path(out.name).read_bytes()).file}
    return [files[name] for name in names]


@dataclass(frozen=True, slots=True)
class _Page:
    """One proto on its way to Markdown."""

    file: FileDescriptorProto
    comments: Mapping[_Position, str]
    known: frozenset[str]
    """Full names that have a place on the page."""

    def lines(self) -> Iterator[str]:
        yield f"## {self.file.name}\n"
        yield self.comments[_FILE,] + "\n"
        for index, service in enumerate(self.file.service):
            yield from self._service(service, (_SERVICE, index))
        for index, message in enumerate(self.file.message_type):
            yield from self._message(message, (_MESSAGE, index), f"{self.file.package}.")
        for index, enum in enumerate(self.file.enum_type):
            yield from self._enum(enum, (_ENUM, index), f"{self.file.package}.")

    def _service(self, service: ServiceDescriptorProto, position: _Position) -> Iterator[str]:
        yield _heading(f"{self.file.package}.{service.name}", service.name)
        yield self.comments[position] + "\n"
        for index, method in enumerate(service.method):
            yield f"#### {service.name}.{method.name}\n"
            yield self._signature(method) + "\n"
            yield self.comments[*position, _METHOD, index] + "\n"

    def _signature(self, method: MethodDescriptorProto) -> str:
        asked, answered = self._linked(method.input_type), self._linked(method.output_type)
        streams = ["stream " if streaming else "" for streaming in (method.client_streaming, method.server_streaming)]
        return f"{streams[0]}{asked} → {streams[1]}{answered}"

    def _message(self, message: DescriptorProto, position: _Position, prefix: str) -> Iterator[str]:
        name = f"{prefix}{message.name}"
        yield _heading(name, name.removeprefix(f"{self.file.package}."))
        yield self.comments[position] + "\n"
        if message.field:
            yield "| field | no. | type | |\n|---|---|---|---|"
            for index, field in enumerate(message.field):
                comment = self.comments[*position, _FIELD, index]
                yield f"| `{field.name}` | {field.number} | {self._type(message, field)} | {_in_cell(comment)} |"
            yield ""
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*position, _NESTED, index), f"{name}.")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*position, _NESTED_ENUM, index), f"{name}.")

    def _type(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        entry = next((nested for nested in message.nested_type if field.type_name.endswith(f".{nested.name}")), None)
        if entry is not None and entry.options.map_entry:
            key, value = (self._plain(each) for each in entry.field)
            return f"map of {key} to {value}"
        text = self._plain(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {text}"
        if field.proto3_optional:
            return f"optional {text}"
        if field.HasField("oneof_index"):
            return f"{text}, one of {message.oneof_decl[field.oneof_index].name}"
        return text

    def _plain(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._linked(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _linked(self, name: str) -> str:
        full = name.removeprefix(".")
        short = full.removeprefix(f"{self.file.package}.")
        return f"[{short}](#{full})" if full in self.known else f"`{full}`"

    def _enum(self, enum: EnumDescriptorProto, position: _Position, prefix: str) -> Iterator[str]:
        name = f"{prefix}{enum.name}"
        yield _heading(name, name.removeprefix(f"{self.file.package}."))
        yield self.comments[position] + "\n"
        yield "| value | no. | |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {_in_cell(self.comments[*position, _VALUE, index])} |"
        yield ""


def reference(files: Sequence[FileDescriptorProto]) -> str:
    """The page. Raises KeyError for what has no comment; buf's COMMENTS rules find it first."""
    known = frozenset(name for file in files for name in _names(file))
    contents = [
        f"- [{service.name}](#{file.package}.{service.name}): {_comments(file)[_SERVICE, index]}"
        for file in files
        for index, service in enumerate(file.service)
    ]
    pages = ("\n".join(_Page(file, _comments(file), known).lines()) for file in files)
    return "\n".join([_HEAD, *contents, "", *pages]).rstrip("\n") + "\n"


def _names(file: FileDescriptorProto) -> Iterator[str]:
    def below(message: DescriptorProto, prefix: str) -> Iterator[str]:
        yield (name := f"{prefix}.{message.name}")
        yield from (f"{name}.{enum.name}" for enum in message.enum_type)
        for nested in message.nested_type:
            yield from below(nested, name)

    yield from (f"{file.package}.{enum.name}" for enum in file.enum_type)
    for message in file.message_type:
        yield from below(message, file.package)


def _comments(file: FileDescriptorProto) -> dict[_Position, str]:
    """By source position, as Markdown: one space is what follows `//`."""
    return {
        tuple(location.path): "\n".join(line.removeprefix(" ") for line in location.leading_comments.splitlines())
        for location in file.source_code_info.location
        if location.leading_comments
    }


def comments_of(message: str) -> dict[str, str]:
    """The comment of each field of a message, by its full name."""
    for file in described():
        for index, one in enumerate(file.message_type):
            if f"{file.package}.{one.name}" == message:
                comments = _comments(file)
                fields = enumerate(one.field)
                return {field.name: comments[_MESSAGE, index, _FIELD, number] for number, field in fields}
    raise KeyError(message)


def _heading(full_name: str, name: str) -> str:
    """With a place to link to that no other package's heading has."""
    return f'<a id="{full_name}"></a>\n\n### {name}\n'


def _in_cell(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/api.md from the protos.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the committed page is stale")
    check: bool = parser.parse_args().check
    page = reference(described())
    if not check:
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        raise SystemExit("docs/api.md is stale (run `make protos`)")


if __name__ == "__main__":
    main()
