"""The words between an instance and our module in an `lmcache server`, inside LMCache's envelope for such modules.

    request    uid │ "server_module_call" │ {method, payload: length of the head (4 bytes) ∙ head ∙ page}
    answer     uid │ "server_module_call" │ {success, payload: status (1 byte) ∙ page, error}

Frames of ZMQ, each but the payload MessagePack. Whole pages go through the socket: LMCache's own engines copy into the
server's shared memory, where one that was stopped for long could write into what has become another's object.
Nothing here is pickled. Both sides take numbers and names as claims: they are checked before anything is reserved.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from kv_transfer.page import Buffer
from kv_transfer.store import StoreError

PROTOCOL_VERSION = 1
MAX_VALUE_BYTES = 256 << 20
OPERATION = "server_module_call"
PUT, GET, CONTAINS, DELETE = ("tandem_kv.put", "tandem_kv.get", "tandem_kv.contains", "tandem_kv.delete")
_LENGTH = struct.Struct(">I")
_MAX_HEAD_BYTES = 1024


class Status(IntEnum):
    """How a request ended at the server."""

    OK = 0
    MISSING = 1
    BAD_VALUE = 2
    FULL = 3
    """No memory: LMCache evicts once a second."""
    BUSY = 4
    """Somebody else holds the page."""
    LATE = 5
    """LMCache's storage did not end the task in time."""
    REFUSED = 6
    """Not a request of ours, or of another protocol version."""


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What a request is about."""

    version: int
    model_name: str
    chunk_hash: bytes
    cache_salt: str
    num_bytes: int
    """Length of the value: put and get."""
    timeout_s: float
    """How long the client will wait; the server should have answered by then."""


class _Answer(msgspec.Struct, frozen=True):
    """LMCache's ServerModuleCallResponse, the page left where it is."""

    success: bool
    payload: memoryview
    error: str


_heads = msgspec.msgpack.Decoder(Head)
_answers = msgspec.msgpack.Decoder(_Answer)


def request_frames(number: int, method: str, head: Head, buffers: Sequence[Buffer] = ()) -> list[bytes]:
    """The frames of a request. The envelope is written by hand, so that the page is copied once."""
    packed = msgspec.msgpack.encode(head)
    start = _LENGTH.pack(len(packed)) + packed
    num_bytes = len(start) + sum(len(buffer) for buffer in buffers)
    envelope = b"\x82\xa6method" + msgspec.msgpack.encode(method) + b"\xa7payload\xc6" + _LENGTH.pack(num_bytes)
    body = b"".join([envelope, start, *buffers])
    return [msgspec.msgpack.encode(number), msgspec.msgpack.encode(OPERATION), body]


def parse_request(payload: bytes) -> tuple[Head, memoryview] | None:
    """Head and page as the server gets them; None: not ours."""
    view = memoryview(payload)
    if len(view) < _LENGTH.size:
        return None
    (head_len,) = _LENGTH.unpack_from(view)
    if head_len > min(_MAX_HEAD_BYTES, len(view) - _LENGTH.size):
        return None
    start = _LENGTH.size + head_len
    try:
        head = _heads.decode(view[_LENGTH.size : start])
    except msgspec.MsgspecError:
        return None
    if head.version != PROTOCOL_VERSION or not 0 <= head.num_bytes <= MAX_VALUE_BYTES:
        return None
    return head, view[start:]


def parse_answer(frames: Sequence[Buffer], number: int) -> tuple[Status, memoryview] | None:
    """Status and page; None: the answer to another request. Raises StoreError if it makes no sense."""
    try:
        if len(frames) < 2 or msgspec.msgpack.decode(frames[0], type=int) != number:
            return None
        answer = _answers.decode(frames[2])
        if not answer.success:
            raise StoreError("no_module" if answer.error.startswith("unknown server module method") else "server")
        return Status(answer.payload[0]), answer.payload[1:]
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise StoreError("protocol") from error
