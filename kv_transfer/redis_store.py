"""A store in Redis or Valkey: one value for each page, a time to live on every key.

    <prefix>:v1/<fingerprint>/<first byte of hash>/<hash>             full blocks, shared by everybody
    <prefix>:v1/<fingerprint>/transfers/<SHA-256 of transfer>/<hash>  tails, deleted by their owner

Pages go from KV memory into the socket and from the socket into KV memory. Reads and writes have connections of their
own, so that a server that takes no writes (a replica, a paused one) can still be read from. A value is asked for by
GETRANGE, one byte longer than it must be: one that is too long is known as such and never sent whole.

Nothing is tried twice and nothing waits for longer than its time-out; asking a dead server less often is the
business of the breaker above. Needs no client library: none of them can receive into memory that is already there.
Permissions an ACL user needs: getrange set del strlen pexpire info hello select client|setname, on <prefix>:*.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.page import Buffer
from kv_transfer.redis_dial import Dialer, parse_info
from kv_transfer.redis_link import Budget, ReadAnswer, Slots
from kv_transfer.redis_wire import LinkError, Refused, Reply, ReplyReader, encode
from kv_transfer.store import BadValue, PageKey, StoreError

T = TypeVar("T")
_LOG_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisLimits:
    """How long things live and last, seconds."""

    ttl_s: float = 3600.0
    """Of a full block, from the last time that somebody saved it or found it saved."""
    tail_ttl_s: float = 3600.0
    """Of a tail; longer than any lease."""
    timeout_s: float = 0.25
    """For an answer, apart from the time for its bytes."""
    min_bytes_per_s: float = 50e6
    """Speed below which a page is late."""
    down_s: float = 2.0
    """How long after a failure nothing is deleted: the time to live will see to it."""

    def budget(self, *, num_sent_bytes: int = 0, num_read_bytes: int = 0) -> Budget:
        """Time for a request and its answer."""
        return Budget(
            self.timeout_s + num_sent_bytes / self.min_bytes_per_s,
            self.timeout_s + num_read_bytes / self.min_bytes_per_s,
        )


class RedisStore:
    """See the module. Implements kv_transfer.store.BlockStore. Connects whenever it has no connection."""

    name = "redis"

    def __init__(
        self, dialer: Dialer, *, prefix: str = "tandem", num_connections: int = 1, limits: RedisLimits | None = None
    ) -> None:
        self.dialer = dialer
        self._prefix = prefix
        self._limits = limits or RedisLimits()
        self._readers = Slots(num_connections, dialer.dial)
        self._writers = Slots(num_connections, dialer.dial)
        self._health = _Health(str(dialer.address))

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        num_bytes = sum(len(buffer) for buffer in buffers)
        name, ttl_ms = self._name(key), b"%d" % self._ttl_ms(key)
        before = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, num_bytes)
        after = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl_ms), ttl_ms)
        budget = self._limits.budget(num_sent_bytes=num_bytes)
        reply = self._ask(self._writers, [before, *buffers, after], ReplyReader.reply, budget)
        if isinstance(reply, Refused):
            raise self._refused(reply)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        num_bytes = sum(len(buffer) for buffer in buffers)
        request = encode("GETRANGE", self._name(key), 0, num_bytes)
        answer = _PageAnswer(buffers, num_bytes, check)
        budget = self._limits.budget(num_read_bytes=num_bytes)
        outcome = self._ask(self._readers, [request], answer.read, budget)
        if isinstance(outcome, Refused):
            if outcome.reason == "type":
                raise BadValue("type")
            raise self._refused(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        name = self._name(key)
        request = encode("STRLEN", name) + encode("PEXPIRE", name, self._ttl_ms(key))

        def read(replies: ReplyReader, deadline: float) -> tuple[Reply, Reply]:
            return replies.reply(deadline), replies.reply(deadline)

        length, _ = self._ask(self._writers, [request], read, self._limits.budget())
        if isinstance(length, Refused) and length.reason != "type":
            raise self._refused(length)
        return length == num_bytes

    def delete(self, key: PageKey) -> None:
        if self._health.is_bad_since(self._limits.down_s):
            raise LinkError("down")
        reply = self._ask(self._writers, [encode("DEL", self._name(key))], ReplyReader.reply, self._limits.budget())
        if isinstance(reply, Refused):
            raise self._refused(reply)

    def close(self) -> None:
        self._readers.close()
        self._writers.close()

    def connect(self) -> None:
        """Make the connections before they are needed. Raises StoreError.

        Not for the milliseconds alone: where pages follow the login at once, BBR takes the small answers for all that
        the way can carry, and may leave the connection at half its speed for good (1.4 GB/s against 2.2 on loopback).
        """
        try:
            self._readers.connect()
            self._writers.connect()
        except LinkError as error:
            self._health.failed(error.reason)
            raise

    def info(self, section: str) -> dict[str, str]:
        """What Redis says of itself. Raises StoreError."""
        reply = self._ask(self._writers, [encode("INFO", section)], ReplyReader.reply, self._limits.budget())
        if isinstance(reply, Refused):
            raise reply
        return parse_info(reply) if isinstance(reply, bytes) else {}

    def _ask(self, slots: Slots, request: Sequence[Buffer], read: ReadAnswer[T], budget: Budget) -> T:
        try:
            answer = slots.exchange(request, read, budget)
        except LinkError as error:
            self._health.failed(error.reason)
            raise
        self._health.worked()
        return answer

    def _refused(self, reply: Refused) -> StoreError:
        self._health.refused(reply.reason)
        if reply.reason == "readonly":
            self._writers.drop("readonly")  # the name may stand for another server by now
        return reply

    def _name(self, key: PageKey) -> bytes:
        return f"{self._prefix}:{'/'.join(key.parts)}".encode()

    def _ttl_ms(self, key: PageKey) -> int:
        return round(1000 * (self._limits.tail_ttl_s if key.scope else self._limits.ttl_s))


@dataclass(slots=True)
class _PageAnswer:
    """Reads what GETRANGE answers. Whatever the value is, it is read or skipped to its end, to stay in step."""

    buffers: Sequence[Buffer]
    num_bytes: int
    check: Callable[[], None]

    def read(self, reply: ReplyReader, deadline: float) -> bool | Exception:
        """Whether there is a value; what is wrong with it, or with us, as an exception to raise afterwards."""
        length = reply.bulk_length(deadline)
        if isinstance(length, Refused):
            return length
        if length is None or length > self.num_bytes + 1:
            raise LinkError("protocol")
        if length != self.num_bytes:
            reply.skip(length + 2, deadline)
            return BadValue("size") if length else False  # GETRANGE of nothing is empty
        head, *rest = [memoryview(buffer).cast("B") for buffer in self.buffers]
        reply.fill(head, deadline)
        try:
            self.check()
        except Exception as error:
            reply.skip(length - len(head) + 2, deadline)
            return error
        for view in rest:
            reply.fill(view, deadline)
        reply.skip(2, deadline)
        return True


class _Health:
    """Says when Redis does not serve and when it answers again, each thing once in a while only. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._failed_at: float | None = None
        self._said: dict[str, float] = {}

    def is_bad_since(self, seconds: float) -> bool:
        """The last that happened was a failure of a connection, less than `seconds` ago."""
        failed_at = self._failed_at
        return failed_at is not None and time.monotonic() - failed_at < seconds

    def failed(self, reason: str) -> None:
        """Redis was not reached."""
        self._failed_at = time.monotonic()
        self.refused(reason)

    def refused(self, reason: str) -> None:
        """Redis does not do what it was asked."""
        self._say(f"does not serve: {reason}; KV is computed instead")

    def worked(self) -> None:
        """Redis has answered."""
        if self._failed_at is not None:
            self._failed_at = None
            self._say("answers again")

    def _say(self, what: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._said.get(what, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
                return
            self._said[what] = now
        _log.warning("redis at %s %s", self._address, what)
