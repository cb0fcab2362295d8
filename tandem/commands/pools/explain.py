"""`tandem pools explain`: where a prompt would run now, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from tandem.commands.pools.reach import aligned, operating, reaching_the_router

if TYPE_CHECKING:
    from protos.tandem.v1 import pools_pb2


@click.command("explain")
@click.argument("prompt", required=False)
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(min=1), help="In place of PROMPT: any prompt of so many tokens."
)
@click.option("--session", default="", metavar="NAME", help="As if it belonged to this session.")
@click.option("--cache-salt", default="", metavar="TEXT", help="As if it were sent with this salt.")
@reaching_the_router
@click.pass_obj
def explain(
    outer_admin: str | None,
    prompt: str | None,
    num_tokens: int | None,
    session: str,
    cache_salt: str,
    admin: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Say where PROMPT would run now: every instance's score and its parts, who was left out, and whether it is split.

    Nothing is generated. Without PROMPT or --tokens it is a prompt of one token.

    \b
    Examples:
      tandem pools explain "Once upon a time"
      tandem pools explain --tokens 4000 --json
      tandem pools explain "And then?" --session customer-7
    """
    from protos.tandem.v1 import common_pb2, pools_pb2

    if prompt is not None and num_tokens is not None:
        raise click.UsageError("PROMPT and --tokens exclude each other")
    request = pools_pb2.ExplainPickRequest(session=session, cache_salt=cache_salt, text=prompt or "")
    if prompt is None:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=[0] * (num_tokens or 1)))
    with operating(admin or outer_admin) as stub:
        answer = stub.ExplainPick(request, timeout=timeout_s)
    click.echo(json.dumps(_explained_as_dict(answer), indent=2) if as_json else _explained(answer))


def _explained(answer: pools_pb2.ExplainPickResponse) -> str:
    lines: list[str] = []
    for pool, candidates in (("decode", answer.decode), ("prefill", answer.prefill)):
        lines += [f"{pool} pool, lowest score first" if candidates else f"{pool} pool: empty"]
        rows = [
            (
                "  →" if one.picked else "   ",
                one.instance_id or one.address,
                "left out" if one.rejected else f"{one.score:g}",
                one.rejected or " + ".join(f"{part.weight:g} × {part.scorer} {part.value:g}" for part in one.parts),
            )
            for one in candidates
        ]
        lines += [aligned(rows, right={2})] if rows else []
    if not answer.HasField("disaggregated"):
        lines.append(f"It could not be served now: {answer.reason}.")
    else:
        verb = "would be split between the pools" if answer.disaggregated else "would run at the decode instance alone"
        lines.append(f"It {verb}: {answer.reason}.")
    return "\n".join(lines)


def _explained_as_dict(answer: pools_pb2.ExplainPickResponse) -> dict[str, Any]:
    def candidate(one: pools_pb2.Candidate) -> dict[str, Any]:
        parts = [{"scorer": part.scorer, "value": part.value, "weight": part.weight} for part in one.parts]
        standing = {"rejected": one.rejected} if one.rejected else {"score": one.score, "parts": parts}
        return {"instance": one.instance_id, "address": one.address, "picked": one.picked, **standing}

    return {
        "decode": [candidate(one) for one in answer.decode],
        "prefill": [candidate(one) for one in answer.prefill],
        "disaggregated": answer.disaggregated if answer.HasField("disaggregated") else None,
        "reason": answer.reason,
    }
