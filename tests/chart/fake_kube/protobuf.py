"""Objects in Kubernetes' protobuf form, as far as Helm sends them: its release Secrets, and options of deletions.

The envelope is four bytes, then `runtime.Unknown` {1: TypeMeta, 2: raw}; field numbers are those of
k8s.io/api/core/v1/generated.proto and k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.refusal import Refused

MAGIC = b"k8s\0"
_METADATA = {1: "name", 2: "generateName", 3: "namespace", 6: "resourceVersion"}
_MAPS = {11: "labels", 12: "annotations"}


def object_of(body: bytes) -> Object:
    """Raises Refused (415) for kinds that nobody sends like this."""
    unknown = dict(_fields(body[len(MAGIC) :]))
    version, kind = (value.decode() for _, value in sorted(_fields(unknown[1])))
    found: Object = {"apiVersion": version, "kind": kind, "metadata": {}}
    if kind == "Secret":
        _read_secret(found, unknown[2])
    elif kind == "Namespace":
        found["metadata"] = _metadata(dict(_fields(unknown[2]))[1])
    elif kind != "DeleteOptions":
        raise Refused(415, "UnsupportedMediaType", f"a {kind} in protobuf; send JSON")
    return found


def _read_secret(found: Object, raw: bytes) -> None:
    for number, value in _fields(raw):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2:
            entry = dict(_fields(value))
            found.setdefault("data", {})[entry[1].decode()] = base64.b64encode(entry.get(2, b"")).decode()
        elif number == 3:
            found["type"] = value.decode()


def _metadata(raw: bytes) -> Object:
    metadata: Object = {}
    for number, value in _fields(raw):
        if number in _METADATA and value:
            metadata[_METADATA[number]] = value.decode()
        elif number in _MAPS:
            entry = dict(_fields(value))
            metadata.setdefault(_MAPS[number], {})[entry[1].decode()] = entry.get(2, b"").decode()
    return metadata


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a message, by number; numbers are of no interest here."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            varint()
            continue
        length = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        if wire == 2:
            yield number, message[at : at + length]
        at += length
