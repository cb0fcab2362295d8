"""The requests that run at this router, by the labels their clients gave them, so that Abort finds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Running:
    """Labels need not be unique: an abort ends every request that bears it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._aborts: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)

    @property
    def num_requests(self) -> int:
        return sum(map(len, self._aborts.values()))

    @contextmanager
    def entered(self, label: str, abort: Callable[[], None]) -> Iterator[None]:
        """While inside, an abort of `label` calls `abort`, at most once."""
        self._aborts[label].append(abort)
        try:
            yield
        finally:
            if abort in self._aborts[label]:
                self._aborts[label].remove(abort)
            if not self._aborts[label]:
                del self._aborts[label]

    def abort(self, labels: Iterable[str]) -> int:
        """Ends every request with one of `labels`; returns how many those were."""
        aborts = [abort for label in set(labels) for abort in self._aborts.pop(label, ())]
        for abort in aborts:
            abort()
        return len(aborts)
