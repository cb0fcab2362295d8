"""One watch: what has happened since a revision, as far as it is of the watcher's interest, line by line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.chart.fake_kube.kinds import Kind, Object
from tests.chart.fake_kube.refusal import Refused
from tests.chart.fake_kube.selecting import matches_fields, matches_labels
from tests.chart.fake_kube.store import Event, Store

_INITIAL = {"k8s.io/initial-events-end": "true"}


@dataclass(frozen=True, slots=True)
class Interest:
    """What a list or a watch is of."""

    kind: Kind
    namespace: str | None
    labels: str = ""
    fields: str = ""

    def covers(self, found: Object) -> bool:
        """Whether `found` is to be told of."""
        metadata = found["metadata"]
        return (
            self.namespace in (None, metadata.get("namespace"))
            and matches_labels(metadata.get("labels"), self.labels)
            and matches_fields(found, self.fields)
        )

    def listed(self, store: Store) -> list[Object]:
        """What there is now."""
        return [found for found in store.all(self.kind.kind) if self.covers(found)]


async def watched(
    store: Store, interest: Interest, query: dict[str, str], *, from_list: bool
) -> AsyncIterator[dict[str, Any]]:
    """Never ends by itself, but for an ERROR where the log is forgotten. `from_list`: begins with what there is."""
    revision = store.revision if from_list else int(query["resourceVersion"])
    if from_list:
        for found in interest.listed(store):
            yield {"type": "ADDED", "object": found}
        if query.get("sendInitialEvents") == "true":
            yield _bookmark(interest.kind, revision, _INITIAL)
    while True:
        try:
            events = list(store.since(revision))
        except Refused as refused:
            yield {"type": "ERROR", "object": refused.status()}
            return
        for event in events:
            revision = event.revision
            if told := _told(event, interest):
                yield told
        if events and query.get("allowWatchBookmarks") == "true":
            yield _bookmark(interest.kind, revision, {})
        await store.wait(revision)
        await asyncio.sleep(0)


def _told(event: Event, interest: Interest) -> dict[str, Any] | None:
    """An object that comes to match or no longer does is added or deleted, as far as this watcher knows."""
    if event.kind != interest.kind:
        return None
    is_there = event.change != "DELETED" and interest.covers(event.object)
    was_there = event.before is not None and interest.covers(event.before)
    if not (is_there or was_there):
        return None
    change = "MODIFIED" if is_there and was_there else "ADDED" if is_there else "DELETED"
    return {"type": change, "object": event.object}


def _bookmark(kind: Kind, revision: int, annotations: dict[str, str]) -> dict[str, Any]:
    metadata = {"resourceVersion": str(revision), "creationTimestamp": None, "annotations": annotations}
    return {
        "type": "BOOKMARK",
        "object": {"kind": kind.kind, "apiVersion": kind.group_version, "metadata": metadata},
    }
