"""The settings files that the chart renders, read by the services' own trees: what a template writes has to be there.

The schema refuses wrong settings of a user; this sees wrong ones of the chart, before a pod does.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from pydantic import ValidationError

from decode_service.config import DecodeSettings
from helm.rendering import Manifest
from prefill_service.config import PrefillSettings
from router.config import RouterSettings
from serving.settings import Settings

TREES: dict[str, type[Settings]] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
_SUFFIX = "-settings"


def check_settings(objects: Sequence[Manifest]) -> None:
    """Raises ValueError, which names the ConfigMap and the setting, where a service would not start with its file."""
    for one in objects:
        name = one["metadata"]["name"]
        if one["kind"] != "ConfigMap" or not name.endswith(_SUFFIX):
            continue
        tree = TREES[name.removesuffix(_SUFFIX).rpartition("-")[2]]
        try:
            tree(**yaml.safe_load(one["data"]["settings.yaml"]))
        except ValidationError as error:
            raise ValueError(f"ConfigMap {name}: {error}") from error
