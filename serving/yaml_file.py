"""YAML that people write: a key that is there twice is an error, since YAML's libraries would drop the first value."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import yaml
from yaml.constructor import BaseConstructor

_MERGE = "tag:yaml.org,2002:merge"
"""`<<`, which may be there several times: no key is lost."""
_VALUE = "tag:yaml.org,2002:value"
"""`=`, a key like any other."""


class DuplicateKeyError(yaml.YAMLError, ValueError):
    """A key that one map has twice."""


class UniqueKeys(BaseConstructor):
    """Of a loader: checks each document before it is constructed, when no merge has changed its maps yet."""

    def construct_document(self, node: yaml.Node) -> Any:
        for one in _maps(node):
            self._check_keys(one)
        return super().construct_document(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name = key.value if key.tag == _VALUE else self.construct_object(key)
            line = key.start_mark.line + 1
            if name in lines:
                raise DuplicateKeyError(f"{name!r} is there twice, in lines {lines[name]} and {line}: keep one of them")
            lines[name] = line


def _maps(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Every map of a document, once: an anchor's node is also where its aliases are, even within itself."""
    left, seen = [root], {id(root)}
    while left:
        node = left.pop()
        if isinstance(node, yaml.MappingNode):
            yield node
            children = [child for pair in node.value for child in pair]
        else:
            children = node.value if isinstance(node, yaml.SequenceNode) else []
        new = {id(child): child for child in reversed(children) if id(child) not in seen}
        seen.update(new)
        left += new.values()


class UniqueKeyLoader(UniqueKeys, yaml.SafeLoader):
    """yaml.SafeLoader that raises DuplicateKeyError."""


def parse_yaml(text: str) -> Any:
    """The document. Raises ValueError, which says what is wrong and where."""
    try:
        loader = UniqueKeyLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except DuplicateKeyError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"not YAML: {error}") from None
