"""The router's section `kubernetes`: what it may resize. Who is in the pools is said where the pools are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import field_validator

from router.pools.instances import Role
from serving.settings import Section, setting

_PLURALS = {"deployment": "deployments", "statefulset": "statefulsets"}
_WORKLOAD = re.compile(r"(?P<kind>deployment|statefulset)/(?P<name>[a-z0-9]([-.a-z0-9]*[a-z0-9])?)")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


class Workload(NamedTuple):
    """What owns the pods of a pool."""

    plural: str
    """Of its kind, as in the API's paths."""
    name: str


class KubernetesSettings(Section):
    """A router in a pod, and the workloads that it may resize. docs/kubernetes.md lists the rights that it needs."""

    prefill: str = setting("", "Owner of the prefill pods, deployment/NAME or statefulset/NAME; empty: not resized.")
    decode: str = setting("", "Owner of the decode pods, deployment/NAME or statefulset/NAME; empty: not resized.")
    lease: str = setting("tandem-autoscaler", "Name of the Lease that says which of several routers resizes.")
    namespace: str = setting("", "Namespace of the workloads, the Lease and the Services; empty: the router's own.")
    account_folder: str = setting(
        "/var/run/secrets/kubernetes.io/serviceaccount", "Folder with the pod's token, ca.crt and namespace."
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _is_workload(cls, text: str) -> str:
        if text and _WORKLOAD.fullmatch(text) is None:
            raise ValueError(f"{text!r} is no workload: write deployment/NAME or statefulset/NAME")
        return text

    @field_validator("lease")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no name of an object: of [a-z0-9.-], as in tandem-autoscaler")
        return name

    @property
    def workloads(self) -> Mapping[Role, Workload]:
        """Of the pools that may be resized."""
        told: dict[Role, str] = {"prefill": self.prefill, "decode": self.decode}
        return {role: _workload(text) for role, text in told.items() if text}


def _workload(text: str) -> Workload:
    kind, _, name = text.partition("/")
    return Workload(_PLURALS[kind], name)
