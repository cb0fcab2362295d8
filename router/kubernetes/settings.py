"""Settings for a router in a Kubernetes cluster: the workloads that it may resize. PoolSettings name the Services."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import field_validator

from router.pools.instance_info import Role
from serving.settings import Section, setting

_NAME = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
_WORKLOAD = rf"(deployment|statefulset)/{_NAME}"


class Workload(NamedTuple):
    """The owner of a pool's pods."""

    plural: str
    """Of its kind, as in the paths of the API."""
    name: str


class KubernetesSettings(Section):
    """A router in a pod, and the workloads that it may resize. docs/kubernetes/security.md lists the rights for it."""

    prefill: str = setting("", "Owner of the prefill pods, deployment/NAME or statefulset/NAME; empty: not resized.")
    decode: str = setting("", "Owner of the decode pods, deployment/NAME or statefulset/NAME; empty: not resized.")
    lease: str = setting("tandem-autoscaler", "Name of the Lease by which several routers elect the one that resizes.")
    mark_pods: bool = setting(
        True, "Mark the pods to remove first by pod-deletion-cost, for which the router needs the right to patch pods."
    )
    namespace: str = setting("", "Namespace of the workloads, the Lease and the Services; empty: the router's own.")
    account_folder: str = setting(
        "/var/run/secrets/kubernetes.io/serviceaccount", "Folder with the pod's token, ca.crt and namespace."
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _is_workload(cls, text: str) -> str:
        if text and not re.fullmatch(_WORKLOAD, text):
            raise ValueError(f"{text!r} is no workload: write deployment/NAME or statefulset/NAME")
        return text

    @field_validator("lease")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"{name!r} is no name of an object: of [a-z0-9.-], as in tandem-autoscaler")
        return name

    @property
    def workloads(self) -> Mapping[Role, Workload]:
        """Of the pools that may be resized."""
        owners: dict[Role, str] = {"prefill": self.prefill, "decode": self.decode}
        named = {role: owner.split("/") for role, owner in owners.items() if owner}
        return {role: Workload(f"{kind}s", name) for role, (kind, name) in named.items()}
