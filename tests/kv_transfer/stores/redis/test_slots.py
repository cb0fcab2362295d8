"""Threads that come back at once leave the others a turn."""

from __future__ import annotations

import threading
import time

from kv_transfer.stores.redis.slots import Slots
from tests.waiting import wait_until


def test_no_thread_waits_for_as_long_as_others_come_back() -> None:
    slots, counts, stop = Slots(1), [0] * 4, threading.Event()

    def come_back(index: int) -> None:
        while not stop.is_set():
            with slots:
                counts[index] += 1
                time.sleep(0.001)

    threads = [threading.Thread(target=come_back, args=(index,)) for index in range(len(counts))]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(counts) >= 3, lambda: f"one of them waits: {counts}")
    stop.set()
    for thread in threads:
        thread.join()


def test_as_many_enter_as_there_are_slots_and_new_ones_are_used() -> None:
    slots, inside, leave = Slots(2), list[int](), threading.Event()

    def enter(index: int) -> None:
        with slots:
            inside.append(index)
            leave.wait()

    threads = [threading.Thread(target=enter, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(inside) == 2)
    slots.release()
    wait_until(lambda: len(inside) == 3)
    time.sleep(0.1)
    assert len(inside) == 3
    leave.set()
    for thread in threads:
        thread.join()
    assert sorted(inside) == [0, 1, 2, 3]
