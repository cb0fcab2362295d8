"""helm/tandem/vllm_arguments.yaml: what `instance.vllmArgs` must not contain, with the reason, out of vLLM's host."""

from __future__ import annotations

import yaml

from helm.schema import INSTANCE_OWNED
from vllm_engine.argument_rules import OWN_SETTINGS, REFUSED, WITHOUT_EFFECT, WORKER_COUNTS

_HEAD = "# Made by helm/generate.py out of vllm_engine/argument_rules.py. Read by templates/_engine.tpl.\n"


def vllm_arguments() -> str:
    """`refused` is a reason by argument; `withoutEffect` is no part of an identity; `workerCounts` must be 1 where KV
    is handed over."""
    reasons = {
        **{name: _instead(setting) for name, setting in OWN_SETTINGS.items()},
        **{name: f"it is not supported: {reason}" for name, reason in REFUSED.items()},
        "tensor_parallel_size": "set instance.tensorParallelSize",
        "pipeline_parallel_size": "set instance.pipelineParallelSize",
    }
    rules = {"refused": reasons, "withoutEffect": list(WITHOUT_EFFECT), "workerCounts": list(WORKER_COUNTS)}
    return _HEAD + yaml.safe_dump(rules, width=1000)


def _instead(setting: str) -> str:
    return "the chart sets it, by `model`" if setting in INSTANCE_OWNED else f"set instance.settings.{setting}"
