"""The table of values in the chart's README."""

from __future__ import annotations

import json

from helm.values_doc import Value, documented

BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"


def with_table(readme: str, values_text: str) -> str:
    """The README with its table made new. Raises ValueError where it has no place for one."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README has no {BEGIN} and {END}")
    rows = "\n".join(_row(value) for value in documented(values_text))
    return f"{before}{BEGIN}\n| value | default | what it is |\n|---|---|---|\n{rows}\n{END}{after}"


def _row(value: Value) -> str:
    default = json.dumps(value.default).replace("|", "\\|")
    return f"| `{value.path}` | `{default}` | {value.doc.replace('|', chr(92) + '|')} |"
