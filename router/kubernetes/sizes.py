"""`python -m router.kubernetes.sizes`: prepares the pools' sizes for a Helm upgrade or rollback; a hook of the chart.

With server-side apply each field has owners, and Helm is one of the possible owners of a Deployment's replicas:

    Helm leaves out what it alone has written ──▶ Kubernetes sets 1   ◀── --keep: another owner of the present size
    Helm writes what another one has written  ──▶ a conflict          ◀── --set: Helm's size by /scale beforehand, at
                                                                          each change: it leaves this an owner, too

The router's autoscaler would write its own size again before Helm does, so before --set this takes the lead (--lease).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

import click
import msgspec

from router.autoscaler.resizer import ActuatorError
from router.kubernetes.actuator import held_by
from router.kubernetes.cluster import APPLY_PATCH, Cluster, ClusterError, Conflict, Lease, Missing, Scale
from router.kubernetes.settings import KubernetesSettings

_MANAGER = "tandem-sizes"
_TRIES = 5
_LEAD_S = 60.0
"""Until Helm has written the sizes and removed the Lease, or has failed and the autoscaler continues."""


async def keep(cluster: Cluster, deployment: str) -> None:
    """Makes this an owner of the present size, beside its other owners. Raises ClusterError."""
    path = _path(cluster, deployment)
    for attempt in range(1, _TRIES + 1):
        size = (await cluster.request("GET", path, Scale)).size
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": deployment},
            "spec": {"replicas": size},
        }
        try:
            await cluster.request(
                "PATCH", path, Scale, query={"fieldManager": _MANAGER}, body=body, content_type=APPLY_PATCH
            )
        except Conflict:  # resized meanwhile
            if attempt == _TRIES:
                raise
        else:
            click.echo(f"{deployment} keeps its size of {size}")
            return


async def write(cluster: Cluster, sizes: Mapping[str, int], lease: str) -> None:
    """Resizes them, and nothing that led before resizes them again. Raises ClusterError."""
    led_s = await _take_lead(cluster, lease)
    for deployment, size in sizes.items():
        await _resize(cluster, deployment, size)
        click.echo(f"{deployment} gets a size of {size}")
    if led_s:
        await asyncio.sleep(led_s)  # until then it may resize by a decision that it made before
        for deployment, size in sizes.items():
            await _resize(cluster, deployment, size)


async def _take_lead(cluster: Cluster, lease: str) -> int:
    """Takes it from an autoscaler, which gets it back after _LEAD_S; returns for how many seconds that one had it."""
    if not lease:  # a rollback to a chart that names none
        return 0
    path = cluster.path("coordination.k8s.io/v1", "leases", lease)
    try:
        found = (await cluster.request("GET", path, Lease)).spec
        led_s = 0 if found.holder_identity in (None, "", _MANAGER) else found.lease_duration_seconds or 0
        ours = msgspec.to_builtins(held_by(found, _MANAGER, led_s + _LEAD_S))
        await cluster.request("PATCH", path, Lease, body={"spec": ours})
    except Missing:
        return 0
    except ClusterError as error:
        click.echo(f"the autoscaler goes on and may write other sizes before Helm does: {error}")
        return 0
    return led_s


async def _resize(cluster: Cluster, deployment: str, size: int) -> None:
    path, query = _path(cluster, deployment), {"fieldManager": _MANAGER}
    await cluster.request("PATCH", path, Scale, query=query, body={"spec": {"replicas": size}})


def _path(cluster: Cluster, deployment: str) -> str:
    return cluster.path("apps/v1", "deployments", deployment, "scale")


async def prepare(cluster: Cluster, kept: Sequence[str], written: Sequence[str], lease: str) -> None:
    """`written` are NAME=SIZE. A Deployment that does not exist yet is skipped. Raises ClusterError."""
    for deployment in kept:
        if await _exists(cluster, deployment):
            await keep(cluster, deployment)
    named = (one.partition("=") for one in written)
    sizes = {deployment: int(size) for deployment, _, size in named if await _exists(cluster, deployment)}
    if sizes:
        await write(cluster, sizes, lease)


async def _exists(cluster: Cluster, deployment: str) -> bool:
    try:
        await cluster.request("GET", _path(cluster, deployment), Scale)
    except Missing:
        click.echo(f"{deployment} does not exist yet")
        return False
    return True


async def _run(account_folder: str, kept: Sequence[str], written: Sequence[str], lease: str) -> None:
    cluster = Cluster(account_folder)
    try:
        await prepare(cluster, kept, written, lease)
    finally:
        await cluster.close()


@click.command(help="Prepare the sizes of Deployments for a Helm upgrade; see the module's docstring.")
@click.option("--keep", "kept", multiple=True, metavar="NAME", help="Helm will not write this Deployment's size.")
@click.option("--set", "written", multiple=True, metavar="NAME=SIZE", help="Helm will write this size.")
@click.option("--lease", default="", help="Of the autoscaler, if there is one; it pauses while Helm writes sizes.")
@click.option("--account-folder", default=KubernetesSettings().account_folder, help="Token, ca.crt and namespace.")
def main(account_folder: str, kept: Sequence[str], written: Sequence[str], lease: str) -> None:
    try:
        asyncio.run(_run(account_folder, kept, written, lease))
    except ActuatorError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
