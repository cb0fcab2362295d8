"""`python -m router.kubernetes.sizes`: prepares the pools' sizes for a Helm upgrade or rollback; a hook of the chart.

With server-side apply each field has owners, and Helm is one of the possible owners of a Deployment's replicas:

    Helm leaves out what it alone has written ──▶ Kubernetes sets 1   ◀── --keep: another owner of the present size
    Helm writes what another one has written  ──▶ a conflict          ◀── --set: Helm's size by /scale beforehand
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click

from router.autoscaler.actuator import ActuatorError
from router.kubernetes.cluster import APPLY_PATCH, Cluster, Conflict, Missing, Scale
from router.kubernetes.settings import KubernetesSettings

_MANAGER = "tandem-sizes"
_TRIES = 5


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


async def write(cluster: Cluster, deployment: str, size: int) -> None:
    """Resizes it. Raises ClusterError."""
    path = _path(cluster, deployment)
    await cluster.request("PATCH", path, Scale, query={"fieldManager": _MANAGER}, body={"spec": {"replicas": size}})
    click.echo(f"{deployment} gets a size of {size}")


def _path(cluster: Cluster, deployment: str) -> str:
    return cluster.path("apps/v1", "deployments", deployment, "scale")


async def prepare(cluster: Cluster, kept: Sequence[str], written: Sequence[str]) -> None:
    """`written` are NAME=SIZE. A Deployment that does not exist yet is skipped. Raises ClusterError."""
    for deployment in kept:
        try:
            await keep(cluster, deployment)
        except Missing:
            click.echo(f"{deployment} does not exist yet")
    for deployment, _, size in (one.partition("=") for one in written):
        try:
            await write(cluster, deployment, int(size))
        except Missing:
            click.echo(f"{deployment} does not exist yet")


async def _run(account_folder: str, kept: Sequence[str], written: Sequence[str]) -> None:
    cluster = Cluster(account_folder)
    try:
        await prepare(cluster, kept, written)
    finally:
        await cluster.close()


@click.command(help="Prepare the sizes of Deployments for a Helm upgrade; see the module's docstring.")
@click.option("--keep", "kept", multiple=True, metavar="NAME", help="Helm will not write this Deployment's size.")
@click.option("--set", "written", multiple=True, metavar="NAME=SIZE", help="Helm will write this size.")
@click.option("--account-folder", default=KubernetesSettings().account_folder, help="Token, ca.crt and namespace.")
def main(account_folder: str, kept: Sequence[str], written: Sequence[str]) -> None:
    try:
        asyncio.run(_run(account_folder, kept, written))
    except ActuatorError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
