"""What is made of values.yaml: its schema and the table in the README; and of vLLM's host: the rules of its arguments.

A key that does not exist is an error of `helm install`, down to the last setting of an instance. What the chart decides
itself (addresses, the connector, the model's folder) is left out of the settings, so that it has one place only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from instance.settings import InstanceSettings
from router.settings import RouterSettings
from serving.histogram import LATENCY_BUCKETS_S
from serving.settings import Settings
from vllm_engine.supported import OWN_SETTINGS, REFUSED, WITHOUT_EFFECT, WORKER_COUNTS

ROUTER_OWNED = (
    *(f"router.{name}" for name in ("listen", "model", "model_name", "admin_listen", "workers", "ready_file")),
    "metrics",
    *("server.host", "server.port", "server.advertise"),
    *("pools.prefill", "pools.decode", "pools.stack"),
    *("http.listen", "http.page", "endpoint_picker"),
    *("admission.num_routers", "signals.listen", "signals.routers", "signals.router_name"),
    *("kubernetes", "tls", "auth", "health"),
    *("autoscaler.enabled", "autoscaler.prefill.ttft_objective_s", "autoscaler.decode.itl_objective_s"),
    *(f"autoscaler.{role}.{bound}" for role in ("prefill", "decode") for bound in ("min_size", "max_size")),
)
INSTANCE_OWNED = (
    *("metrics", "tls", "health"),
    *("model.folder", "model.name"),
    *("server.host", "server.port", "server.advertise", "server.listen"),
    *("instance.id", "instance.ready_file", "instance.domain"),
    *("engine.kind", "engine.vllm_args", "engine.tensor_parallel_size", "engine.pipeline_parallel_size"),
    *("transfer.connector", "transfer.folder", "transfer.url", "transfer.secret_file"),
    *("transfer.capacity_bytes", "transfer.options"),
)
"""Sections and settings that other values of the chart decide."""

Schema = dict[str, Any]
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_MARK = "# -- "
_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][\w]*):")
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_CONDITION: Schema = {
    "description": "Read by a parent chart alone, as the condition of its dependency.",
    "type": "boolean",
}
_RULES_HEAD = "# Made by helm/generate.py out of vllm_engine/supported.py. Read by templates/_engine.tpl.\n"


@dataclass(frozen=True, slots=True)
class Value:
    """One documented key, by its path with dots."""

    path: str
    default: Any
    doc: str


def documented(text: str) -> Iterator[Value]:
    """Every key that has a line above it, in the order of the file. Indentation is two spaces a level."""
    values = yaml.safe_load(text)
    above: list[str] = []
    doc = ""
    for line in text.splitlines():
        if line.strip().startswith(_MARK):
            doc = line.strip().removeprefix(_MARK)
        elif matched := _KEY.match(line):
            above = [*above[: len(matched["indent"]) // 2], matched["key"]]
            if doc:
                yield Value(".".join(above), _at(values, above), doc)
            doc = ""


def _at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def values_schema(values_text: str, constraints_path: Path) -> str:
    """The schema as JSON. Raises ValueError if a value's type cannot be derived, or a constraint has no value."""
    constraints: dict[str, Schema] = yaml.safe_load(constraints_path.read_text())
    docs = {value.path: value.doc for value in documented(values_text)}
    schema = _object(yaml.safe_load(values_text), "", constraints, docs)
    schema["properties"]["enabled"] = _CONDITION
    if constraints:
        raise ValueError(f"{constraints_path.name}: values.yaml has no {', '.join(constraints)}")
    schema["$defs"] = {
        "latencyBound": {"enum": list(LATENCY_BUCKETS_S)},
        "pool": _partial(schema["properties"]["instance"]),
        **_definitions("router", RouterSettings, ROUTER_OWNED),
        **_definitions("instance", InstanceSettings, INSTANCE_OWNED),
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Values of the tandem chart"}
    return json.dumps({**head, **schema}, indent=1) + "\n"


def _object(values: dict[str, Any], above: str, constraints: dict[str, Schema], docs: dict[str, str]) -> Schema:
    """The schema of one level. Takes those of `constraints` that it has a value for."""
    properties = {}
    for key, default in values.items():
        path = f"{above}{key}"
        if path in constraints:
            one = constraints.pop(path)
        elif isinstance(default, dict) and default:
            one = _object(default, f"{path}.", constraints, docs)
        elif type(default) in _NAMES:
            one = {"type": _NAMES[type(default)]}
        else:
            raise ValueError(f"{path}: {default!r} does not tell its type; constraints.yaml has to")
        properties[key] = {"description": docs[path], **one} if path in docs else one
    required = [key for key, default in values.items() if _is_required(default, docs.get(f"{above}{key}", ""))]
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


def _is_required(default: Any, doc: str) -> bool:
    """Helm removes a key that a user sets to null, and templates take the lack of one for 0 or empty. That is right
    where it is the default, or where the value's comment says what null means."""
    return default not in (None, {}, []) and "null:" not in doc


def _partial(schema: Schema) -> Schema:
    """The same object, of which any part may be given."""
    properties = {key: _partial(one) if "required" in one else one for key, one in schema["properties"].items()}
    return {**{key: one for key, one in schema.items() if key != "required"}, "properties": properties}


def _definitions(prefix: str, tree: type[Settings], owned: Iterable[str]) -> dict[str, Schema]:
    """The definitions of one settings tree, without what the chart decides, and with nothing required."""
    whole = tree.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    sections: dict[str, Schema] = whole.pop("$defs")
    for path in owned:
        *above, name = path.split(".")
        properties = whole["properties"]
        for section in above:
            properties = sections[_referred(properties[section])]["properties"]
        referred = _referred(properties.pop(name))
        sections.pop(referred, None)
    named = {**sections, tree.__name__: whole}
    return {f"{prefix}.{name}": _plain(definition) for name, definition in named.items()}


def _referred(schema: Schema) -> str:
    """The definition that it refers to, without the prefix; empty for a schema of its own."""
    return str(schema.get("$ref", "")).rpartition(".")[2]


def _plain(definition: Any) -> Any:
    """Without what only Python's side reads."""
    if isinstance(definition, list):
        return [_plain(item) for item in definition]
    if not isinstance(definition, dict):
        return definition
    left_out = ("title", "flag", "required", "default")
    return {key: _plain(value) for key, value in definition.items() if key not in left_out}


def with_table(readme: str, values_text: str) -> str:
    """The chart's README with its table made new. Raises ValueError where it has no place for one."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README has no {BEGIN} and {END}")
    rows = "\n".join(_row(value) for value in documented(values_text))
    return f"{before}{BEGIN}\n| value | default | what it is |\n|---|---|---|\n{rows}\n{END}{after}"


def _row(value: Value) -> str:
    default, doc = (text.replace("|", "\\|") for text in (json.dumps(value.default), value.doc))
    return f"| `{value.path}` | `{default}` | {doc} |"


def vllm_arguments() -> str:
    """helm/tandem/vllm_arguments.yaml: what `instance.vllmArgs` must not contain.

    `refused` is a reason by argument; `withoutEffect` is no part of an identity; `workerCounts` must be 1 where KV is
    handed over.
    """
    reasons = {
        **{name: _instead(setting) for name, setting in OWN_SETTINGS.items()},
        **{name: f"it is not supported: {reason}" for name, reason in REFUSED.items()},
        "tensor_parallel_size": "set instance.tensorParallelSize",
        "pipeline_parallel_size": "set instance.pipelineParallelSize",
    }
    rules = {"refused": reasons, "withoutEffect": list(WITHOUT_EFFECT), "workerCounts": list(WORKER_COUNTS)}
    return _RULES_HEAD + yaml.safe_dump(rules, width=1000)


def _instead(setting: str) -> str:
    return "the chart sets it, by `model`" if setting in INSTANCE_OWNED else f"set instance.settings.{setting}"
