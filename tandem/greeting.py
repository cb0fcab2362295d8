"""What `tandem up` shows once its stack is up: a first text that has crossed both pools, and how to ask for more."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from tandem.local_stack import LocalStack
from tandem.supervision import StackFailed

if TYPE_CHECKING:
    from tandem.completion import Usage

_DEMO_PROMPT = """\
Once upon a time there was a penguin called Penny who had a tandem, but nobody to sit on the back of it. Then Dex the \
dachshund came by. Penny lived above the bicycle shop and was known for one thing: she reads the whole map in one look.

They wanted to ride to the sea, but in between stood a hill. "I will steer," said Penny."""
"""Long enough to be worth a prefill instance, so that what one sees has crossed both pools."""
_DEMO_TOKENS = 60


def show_first_text(stack: LocalStack) -> None:
    """One request through the whole stack, so that the first thing one sees is text. Raises StackFailed."""
    from tandem.client import Client
    from tandem.completion import Usage
    from tandem.errors import TandemError

    click.echo("")
    try:
        with Client(stack.address, timeout_s=60) as client:
            click.secho(_DEMO_PROMPT, bold=True, nl=False)
            usage = Usage()
            for piece in client.stream(_DEMO_PROMPT, max_tokens=_DEMO_TOKENS, temperature=0.0):
                click.echo(piece.text, nl=False)
                sys.stdout.flush()
                usage = piece.usage or usage
            click.echo(" …\n")
            click.echo(_what_moved(usage))
    except TandemError as error:
        raise StackFailed(f"the stack is up but did not answer: {error}") from error


def _what_moved(usage: Usage) -> str:
    if not usage.external_tokens:
        return f"({usage.prompt_tokens} prompt tokens, prefilled where they were decoded)"
    split = f"{usage.external_tokens} of {usage.prompt_tokens} prompt tokens"
    return f"({split} were prefilled by one instance and handed over to another, which wrote the rest)"


def how_to_call(stack: LocalStack) -> str:
    """Who listens where, and what to type to be answered."""
    address = stack.address
    lines = [f"  {name:<11} {member.spec.address}" for name, member in stack.members.items()]
    lines += [
        f"  admin       {stack.admin_address}   (tandem pools)",
        f"  logs        {stack.folder / 'logs'}",
        "",
        "Call it, from another terminal:",
        '  tandem generate --chat "Who lives in the village?"',
        "",
        "from Python:",
        "  from tandem import Client",
        f'  print(Client("{address}").generate("Once upon a time", max_tokens=32).text)',
        "",
        "from anything that speaks gRPC:",
        f"""  grpcurl {_trust(stack)} -d '{{"text": "Once upon a time", "sampling": {{"max_tokens": 32}}}}' \\""",
        f"    {address} tandem.v1.GenerationService/Generate",
        "",
        *_over_http(stack),
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)


def _trust(stack: LocalStack) -> str:
    ca_file = stack.credentials.ca_file
    return "-plaintext" if ca_file is None else f"-cacert {ca_file}"


def _over_http(stack: LocalStack) -> list[str]:
    if stack.http_address is None:
        return []
    ca_file = stack.credentials.ca_file
    where = f"http://{stack.http_address}" if ca_file is None else f"--cacert {ca_file} https://{stack.http_address}"
    return [
        "from anything that speaks OpenAI's API:",
        f"  curl {where}/v1/chat/completions -H 'Content-Type: application/json' \\",
        """    -d '{"messages": [{"role": "user", "content": "Who lives in the village?"}], "max_tokens": 32}'""",
        "",
    ]
