"""The Grafana dashboard: JSON made of the rows and panels in dashboard.yaml.

Every query is restricted to the chosen release by the labels `namespace` and `tandem`, which the chart's monitor sets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

PANELS = Path(__file__).resolve().parent / "dashboard.yaml"
_RELEASE = 'namespace="$namespace", tandem="$release"'
_WIDTH, _HEIGHT, _PER_LINE = 8, 8, 3
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_DATASOURCE = {"type": "prometheus", "uid": "$datasource"}

Panel = dict[str, Any]


def dashboard(described: str) -> str:
    """The dashboard as JSON, of the text of dashboard.yaml."""
    panels: list[Panel] = []
    y = 0
    for row in yaml.safe_load(described):
        place = {"x": 0, "y": y, "w": _WIDTH * _PER_LINE, "h": 1}
        panels.append({"type": "row", "title": row["row"], "collapsed": False, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(row["panels"]):
            line, column = divmod(index, _PER_LINE)
            place = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_graph(panel, place))
        y += -(-len(row["panels"]) // _PER_LINE) * _HEIGHT
    numbered = [{"id": number, **panel} for number, panel in enumerate(panels, start=1)]
    return json.dumps(_whole(numbered), indent=1) + "\n"


def _queries(panel: Panel) -> dict[str, str]:
    """PromQL by legend, @ not yet replaced."""
    if "quantiles" not in panel:
        return dict(panel["queries"])
    metric, brace, matchers = panel["quantiles"]["of"].partition("{")
    by = panel["quantiles"].get("by")
    buckets = f"sum by (le{f', {by}' if by else ''}) (rate({metric}_bucket{brace}{matchers}[$__rate_interval]))"
    legend = f" {{{{{by}}}}}" if by else ""
    return {f"{name}{legend}": f"histogram_quantile({q}, {buckets})" for name, q in _QUANTILES.items()}


def _graph(panel: Panel, place: dict[str, int]) -> Panel:
    stacked = panel.get("stacked", False)
    custom: Panel = {"lineWidth": 1, "fillOpacity": 20 if stacked else 0, "showPoints": "never"}
    custom["stacking"] = {"mode": "normal" if stacked else "none"}
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": panel.get("doc", ""),
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "legendFormat": legend, "expr": query.replace("@", _RELEASE)}
            for index, (legend, query) in enumerate(_queries(panel).items())
        ],
    }


def _variable(name: str, query: str) -> Panel:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
    }


def _whole(panels: list[Panel]) -> Panel:
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    namespace = _variable("namespace", "label_values(tandem_router_info, namespace)")
    release = _variable("release", 'label_values(tandem_router_info{namespace="$namespace"}, tandem)')
    return {
        "uid": "tandem",
        "title": "Tandem",
        "tags": ["tandem", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource, namespace, release]},
        "panels": panels,
    }
