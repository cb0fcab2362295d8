"""Every object, and everything that has happened to them.

    create ──ADDED──▶ there ──MODIFIED──▶ there ──DELETED──▶ gone
                        └─ a pod: deletionTimestamp set, MODIFIED, until its kubelet removes it

Each change has the next revision, which is the object's resourceVersion, and an entry in the log that watches read. The
log forgets: `compact` makes every older revision one that can only be listed anew.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from tests.chart.fake_kube.kinds import Kind, Object, kind_of
from tests.chart.fake_kube.refusal import Refused, conflict, expired

Change = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[Kind, str | None, str]


class Event(NamedTuple):
    """One entry of the log."""

    revision: int
    change: Change
    kind: Kind
    object: Object
    before: Object | None
    """What it was, since a watch may have to tell that an object no longer matches its selector."""


class Store:
    """Belongs to one event loop. What it hands out is not to be changed: `changed` is the one way to."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._log: list[Event] = []
        self._forgotten = 0
        self.revision = 1
        self._news = asyncio.Event()

    def find(self, kind: str, name: str, namespace: str | None = "default") -> Object | None:
        """None where there is none."""
        found = kind_of(kind)
        return self._objects.get((found, namespace if found.namespaced else None, name))

    def get(self, kind: str, name: str, namespace: str | None = "default") -> Object:
        """Raises Refused (404)."""
        found = self.find(kind, name, namespace)
        if found is None:
            raise not_found(kind_of(kind), name)
        return found

    def all(self, kind: str, namespace: str | None = None) -> list[Object]:
        """In every namespace, or in one; the oldest first."""
        return [
            found for (its, where, _), found in self._objects.items() if its.kind == kind and namespace in (None, where)
        ]

    def as_of(self, found: Object, revision: int) -> Object:
        """What `found` was then, or at its first revision; as a stale cache has it."""
        its = [event for event in self._log if event.object["metadata"]["uid"] == found["metadata"]["uid"]]
        later = [event for event in its if event.revision > revision and event.before is not None]
        return later[0].before or found if later else found

    def create(self, new: Object, namespace: str | None = "default") -> Object:
        """Raises Refused (409) where there is one of that name."""
        kind, new = kind_of(new["kind"]), copy.deepcopy(new)
        where = namespace if kind.namespaced else None
        metadata = new.setdefault("metadata", {})
        if "name" not in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        name = metadata["name"]
        if self.find(kind.kind, name, where) is not None:
            raise Refused(409, "AlreadyExists", f'{kind.qualified} "{name}" already exists', name=name)
        if where is not None:
            self.get("Namespace", where)
            metadata["namespace"] = where
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        self._put("ADDED", kind, new, None)
        return new

    def replace(self, new: Object) -> Object:
        """Raises Refused: 404 where there is none, 409 where `new` names another version than there is."""
        kind, new, metadata = kind_of(new["kind"]), copy.deepcopy(new), new["metadata"]
        before = self.get(kind.kind, metadata["name"], metadata.get("namespace"))
        if metadata.get("resourceVersion", "") not in ("", before["metadata"]["resourceVersion"]):
            raise conflict(kind.qualified, metadata["name"])
        kept = {key: before["metadata"][key] for key in ("uid", "creationTimestamp", "resourceVersion", "generation")}
        new["metadata"] |= kept
        if new == before:
            return before
        if new.get("spec") != before.get("spec"):
            new["metadata"]["generation"] += 1
        self._put("MODIFIED", kind, new, before)
        return new

    def changed(self, found: Object, change: Callable[[Object], object]) -> Object:
        """`found` with `change` applied to a copy of what it is now."""
        new = copy.deepcopy(self.get(found["kind"], found["metadata"]["name"], found["metadata"].get("namespace")))
        change(new)
        return self.replace(new)

    def delete(self, found: Object) -> None:
        """At once. Twice is once."""
        kind, metadata = kind_of(found["kind"]), found["metadata"]
        before = self._objects.get((kind, metadata.get("namespace"), metadata["name"]))
        if before is not None and before["metadata"]["uid"] == metadata["uid"]:
            self._put("DELETED", kind, copy.deepcopy(before), before)

    def since(self, revision: int) -> Iterator[Event]:
        """What has happened after `revision`. Raises Refused (410) where that is forgotten."""
        if revision < self._forgotten:
            raise expired(revision)
        return (event for event in self._log[:] if event.revision > revision)

    def compact(self) -> None:
        """Forgets what has happened until now."""
        self._log.clear()
        self._forgotten = self.revision

    async def wait(self, revision: int) -> None:
        """Returns when there has been more than `revision`."""
        while self.revision <= revision:
            await self._news.wait()

    def _put(self, change: Change, kind: Kind, new: Object, before: Object | None) -> None:
        self.revision += 1
        metadata = new["metadata"]
        metadata["resourceVersion"] = str(self.revision)
        key = (kind, metadata.get("namespace"), metadata["name"])
        if change == "DELETED":
            del self._objects[key]
        else:
            self._objects[key] = new
        self._log.append(Event(self.revision, change, kind, new, before))
        self._news.set()
        self._news = asyncio.Event()


def not_found(kind: Kind, name: str) -> Refused:
    """There is no object of that name."""
    return Refused(404, "NotFound", f'{kind.qualified} "{name}" not found', name=name, kind=kind.plural)


def now() -> str:
    """As Kubernetes writes a time."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def owned_by(owner: Object) -> list[Object]:
    """`ownerReferences` of what `owner` makes."""
    metadata = owner["metadata"]
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"]}
    return [{**reference, "uid": metadata["uid"], "controller": True}]


def is_owned_by(found: Object, owner: Object) -> bool:
    """Whether `owner` made it."""
    references = found["metadata"].get("ownerReferences") or []
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in references)
