"""A connection that many threads use at once: each sends its request when it comes, and reads its answer in its turn.

    send, take a number ─▶ wait for the turn ─▶ read the answer into one's own memory ─▶ next
                                 │                       │ raised: broken
                                 └──── broken ───────────┴─▶ every waiter ends ─▶ the last to leave closes the socket

So several requests are in flight (the next page is on its way while this one's digest is checked) without a thread
that owns the connection or a copy between threads. Nobody waits for ever: whoever sends or reads has a deadline, and
breaks the connection for all when it has passed. There are no second tries here; a `Slot` makes a new connection for
the next request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.page import Buffer
from kv_transfer.redis_wire import LinkError, ReplyReader, Wire, link_error

T = TypeVar("T")
_IDLE_S = 0.05
ReadAnswer = Callable[[ReplyReader, float], T]
"""Reads exactly the answers to one request, by the deadline given. What it raises breaks the connection."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a request may take, seconds; each counts from when its turn has come."""

    send_s: float
    answer_s: float


class Connection:
    """In step, or broken for good. Thread-safe; `join` before, `leave` after each use."""

    def __init__(self, wire: Wire, reader: ReplyReader, *, max_in_flight: int) -> None:
        self._wire = wire
        self._reader = reader
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()  # of all below
        self._num_users = 0
        self._turns: deque[threading.Lock] = deque()
        """A gate for each request whose answer is not read yet; the first one is open. Waking only the next thread
        matters: woken all together they would fight for the interpreter while a page waits."""
        self._failure: str | None = None
        # A wire that is not duplex is one thread's from its request to the answer.
        is_alone = max_in_flight == 1 or not wire.is_duplex
        self._in_flight = threading.Lock() if is_alone else threading.Semaphore(max_in_flight)
        self._left_at = time.monotonic()

    @property
    def num_users(self) -> int:
        return self._num_users

    def join(self) -> bool:
        """Begin to use it; False: it is broken, or Redis has closed it while nobody looked."""
        with self._lock:
            if not self._num_users and self._failure is None and time.monotonic() - self._left_at > _IDLE_S:
                self._look()
            if self._failure is not None:
                return False
            self._num_users += 1
            return True

    def leave(self) -> None:
        """End one use."""
        with self._lock:
            self._num_users -= 1
            self._left_at = time.monotonic()
            if self._failure is not None and not self._num_users:
                self._wire.close()

    def break_off(self, reason: str) -> None:
        """End it for everybody."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            self._wire.shutdown()
            if not self._num_users:
                self._wire.close()
            for gate in self._turns:
                if gate.locked():
                    gate.release()

    def exchange(self, request: Sequence[Buffer], read: ReadAnswer[T], budget: Budget) -> T:
        """Send, and return what `read` made of the answer. Raises LinkError."""
        try:
            with self._in_flight:
                turn = self._send(request, budget.send_s)
                turn.acquire()  # as long as it takes: those before us have deadlines
                if self._failure is not None:
                    raise LinkError(self._failure)
                answer = read(self._reader, time.monotonic() + budget.answer_s)
                self._pass()
                return answer
        except OSError as error:
            failure = link_error(error)
            self.break_off(failure.reason)
            raise failure from error
        except LinkError as error:
            self.break_off(error.reason)
            raise
        except BaseException:
            self.break_off("interrupted")
            raise

    def _look(self) -> None:
        """Whether it is still good after a while in which nobody used it."""
        if not self._wire.is_quiet():
            self._failure = "closed"
            self._wire.close()

    def _send(self, request: Sequence[Buffer], send_s: float) -> threading.Lock:
        with self._send_lock:
            turn = self._line_up()
            self._wire.send(request, time.monotonic() + send_s)
            return turn

    def _line_up(self) -> threading.Lock:
        gate = threading.Lock()
        with self._lock:
            if self._failure is not None:
                raise LinkError(self._failure)
            if self._turns:
                gate.acquire()
            self._turns.append(gate)
        return gate

    def _pass(self) -> None:
        with self._lock:
            self._turns.popleft()
            if self._turns and self._turns[0].locked():
                self._turns[0].release()


class Slot:
    """Where one connection is, or will be at the next request."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._failed_at = 0.0
        self._failure = ""
        self._closed = False

    @property
    def num_users(self) -> int:
        connection = self._connection
        return connection.num_users if connection is not None else 0

    def take(self) -> Connection:
        """A connection, joined. Who waited while another failed to connect fails with it: once, not one by one."""
        asked_at = time.monotonic()
        with self._lock:
            if self._closed:
                raise LinkError("closed")
            if self._connection is not None and self._connection.join():
                return self._connection
            self._connection = None
            if self._failed_at >= asked_at:
                raise LinkError(self._failure)
            try:
                connection = self._connect()
            except LinkError as error:
                self._failed_at, self._failure = time.monotonic(), error.reason
                raise
            if not connection.join():
                raise LinkError("closed")
            self._connection = connection
            return connection

    def drop(self, reason: str) -> None:
        """Break the connection, if there is one: the next request makes another."""
        connection = self._connection
        if connection is not None:
            connection.break_off(reason)

    def close(self) -> None:
        """No connection any more, and none to come."""
        with self._lock:
            self._closed = True
        self.drop("closed")


class Slots:
    """A few connections for the same kind of work. A request takes the one that has the fewest others."""

    def __init__(self, num_connections: int, connect: Callable[[], Connection]) -> None:
        self._slots = [Slot(connect) for _ in range(num_connections)]

    def exchange(self, request: Sequence[Buffer], read: ReadAnswer[T], budget: Budget) -> T:
        """As Connection.exchange, on one of them."""
        slots = self._slots
        connection = (slots[0] if len(slots) == 1 else min(slots, key=lambda slot: slot.num_users)).take()
        try:
            return connection.exchange(request, read, budget)
        finally:
            connection.leave()

    def connect(self) -> None:
        """Make all connections that are not there."""
        for slot in self._slots:
            slot.take().leave()

    def drop(self, reason: str) -> None:
        """Break all connections."""
        for slot in self._slots:
            slot.drop(reason)

    def close(self) -> None:
        """End all connections for good."""
        for slot in self._slots:
            slot.close()
