"""`tandem doctor`: one line per thing that must be there, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from tandem.checks import Check, Finding, extras, kernel, machine, model, packages, python

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@click.option("--model", "model_name", default="demo", show_default=True, metavar="NAME", help="Model to look at.")
@click.option("--quick", is_flag=True, help="Leave out the transfer of blocks.")
def command(model_name: str, quick: bool) -> None:
    """Check this machine, the model, the connectors and a running stack.

    Every line is ok, warn (it works, with less) or fail, and says what to do. The exit status is 1 if a line says fail.

    \b
    Examples:
      tandem doctor
      tandem doctor --model ./Qwen3-0.6B
    """
    checks: list[Check] = [python, packages, machine, kernel, extras, model(model_name)]
    if not quick:
        checks.append(_store)
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


def _store() -> Iterator[Finding]:
    from tandem.store_check import move_blocks

    speed = move_blocks()
    yield Finding(
        "ok",
        "shared_storage",
        f"{speed.num_blocks} blocks of {speed.block_bytes >> 20} MiB: written at {speed.write_gb_s:.1f} GB/s, "
        f"read and verified at {speed.read_gb_s:.1f} GB/s",
    )


def _running() -> Iterator[Finding]:
    from tandem.running import running_stacks

    stacks = running_stacks()
    if not stacks:
        yield Finding("ok", "running stack", "none (start one with `tandem up`)")
        return
    from tandem.health import INSTANCE_SERVICE, READY, ROUTER_SERVICE, health, load

    for stack in stacks:
        state = health(stack.address, ROUTER_SERVICE)
        yield _member_finding("router", stack.address, state)
        for name, address in stack.instances.items():
            state = health(address, INSTANCE_SERVICE)
            detail = ""
            if state == READY:
                report = load(address)
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
