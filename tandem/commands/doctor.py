"""`tandem doctor`: one line per thing that must be there, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from tandem.checks import Check, Finding, extras, kernel, machine, model, packages, python
from tandem.stack_settings import CONNECTORS
from tandem.transfer_bench.check import connector_check
from tandem.transfer_bench.choice import choices_of
from tandem.transfer_bench.options import Options, kv_options

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@click.option("--model", "model_name", default="demo", show_default=True, metavar="NAME", help="Model to look at.")
@click.option(
    "--connector",
    default="shared_storage",
    show_default=True,
    metavar="NAME",
    help=f"Connector to move blocks through: {', '.join(CONNECTORS)}, module:Class of your own, or a list: nixl,redis.",
)
@click.option("--kv-url", metavar="URL", help="Its server: redis://host:port/0; for lmcache also tcp://host:port.")
@click.option(
    "--kv-folder", type=click.Path(path_type=Path), help="Its folder.  [default: where `tandem up` would have it]"
)
@kv_options
@click.option("--quick", is_flag=True, help="Leave out the transfer of blocks, which takes some seconds.")
def command(
    model_name: str, connector: str, kv_url: str | None, kv_folder: Path | None, options: Options, quick: bool
) -> None:
    """Check this machine, the model, the connectors and a running stack.

    Every line is ok, warn (it works, with less) or fail, and says what to do. The exit status is 1 if a line says fail.
    Blocks move through the connector that you name, from another process to this one, and every byte is compared.

    \b
    Examples:
      tandem doctor
      tandem doctor --model ./Qwen3-0.6B
      tandem doctor --connector redis --kv-url redis://10.0.0.7:6379/0
      tandem doctor --connector nixl               which transport does UCX choose here?
      tandem doctor --kv-folder /mnt/shared        is the volume fast enough?
    """
    try:
        choices = choices_of(connector, kv_url, kv_folder, options)
        if kv_url is None and any(choice.name == "redis" for choice in choices):
            raise ValueError("the redis connector needs the address of a Redis: --kv-url redis://host:port/0")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    checks: list[Check] = [python, packages, machine, kernel, extras, model(model_name)]
    if not quick:
        checks += [connector_check(choice) for choice in choices]
    checks.append(_running)
    num_failed = 0
    for check in checks:
        for finding in _guarded(check):
            num_failed += finding.verdict == "fail"
            click.secho(f"{finding.verdict:<5}", fg=_COLOURS[finding.verdict], nl=False)
            click.echo(f"{finding.subject:<16} {finding.what}" + (f"  → {finding.remedy}" if finding.remedy else ""))
    if num_failed:
        raise click.exceptions.Exit(1)


def _guarded(check: Check) -> Iterator[Finding]:
    """A check that breaks is a finding, not the end of the report."""
    try:
        yield from check()
    except Exception as error:  # a broken package may raise anything when it is imported
        name = getattr(check, "__name__", "check").strip("_")
        yield Finding("fail", name, f"could not be checked: {type(error).__name__}: {error}", "make install")


def _running() -> Iterator[Finding]:
    from tandem.running import running_stacks

    stacks = running_stacks()
    if not stacks:
        yield Finding("ok", "running stack", "none (start one with `tandem up`)")
        return
    from tandem.credentials import of_stack
    from tandem.health import INSTANCE_SERVICE, READY, ROUTER_SERVICE, health, load

    for stack in stacks:
        credentials = of_stack(Path(stack.folder))
        state = health(stack.address, ROUTER_SERVICE, credentials=credentials)
        yield _member_finding("router", stack.address, state)
        for name, address in stack.instances.items():
            state = health(address, INSTANCE_SERVICE, credentials=credentials)
            detail = ""
            if state == READY:
                report = load(address, credentials=credentials)
                total = sum(value for _, value in report.blocks.ListFields())
                detail = (
                    f", {report.num_running} running, {report.num_waiting} waiting, "
                    f"{report.blocks.running + report.blocks.held} of {total} blocks in use"
                )
            yield _member_finding(name, address, state, detail)


def _member_finding(name: str, address: str, state: str, detail: str = "") -> Finding:
    good = state == "ready"
    remedy = "" if good else "see its log in the stack's folder; `tandem up` starts dead ones again"
    return Finding("ok" if good else "fail", name, f"{state} at {address}{detail}", remedy)
