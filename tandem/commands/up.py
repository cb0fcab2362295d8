"""`tandem up`: a stack on this machine, from nothing to text on the screen, until Ctrl-C."""

from __future__ import annotations

import errno
import signal
import socket
import sys
import threading
import time
from types import FrameType
from urllib.parse import urlsplit

import click

from tandem.autoscale import autoscaled, parse_bounds
from tandem.greeting import how_to_call, show_first_text
from tandem.local_stack import LocalStack
from tandem.models import ModelNotFound, display_name, resolve
from tandem.stack_settings import CONNECTORS, Disaggregation, StackSettings
from tandem.supervision import StackEvent, StackFailed

_START_REDIS = "start one, for example: redis-server --port 6379"


@click.command("up")
@click.option(
    "--prefill",
    "num_prefill",
    type=click.IntRange(0, 64),
    default=1,
    show_default=True,
    help="Prefill instances; 0 serves without disaggregation.",
)
@click.option(
    "--decode", "num_decode", type=click.IntRange(1, 64), default=1, show_default=True, help="Decode instances."
)
@click.option(
    "--autoscale",
    multiple=True,
    metavar="POOL=MIN..MAX",
    help="Let this pool grow and shrink with the load, as in decode=1..3; may be given for both pools.",
)
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="NAME",
    help="demo, a checkpoint's folder, or owner/name on the Hugging Face hub.",
)
@click.option(
    "--connector",
    default="shared_storage",
    show_default=True,
    metavar="NAME",
    callback=lambda context, option, value: _known_connector(value),
    help="How KV gets from prefill to decode: shared_storage, redis, nixl, lmcache, or module:Class of your own. "
    "Several, as in nixl,redis: the first hands over, the others keep prefixes that all prefill instances share.",
)
@click.option(
    "--kv-url",
    metavar="URL",
    help="Server of redis: redis://host:port/0. Of lmcache, which else is on disk: that, or tcp://host:port.",
)
@click.option(
    "--disaggregation",
    type=click.Choice(["always", "auto", "never"]),
    default="auto",
    show_default=True,
    help="auto prefills short rests of a prompt where they are decoded.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the router; 0 takes a free one.  [default: 0]"
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the router's OpenAI API; 0 takes a free one.  [default: 0]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Of weights and KV; absent: the checkpoint's own.",
)
@click.option("--max-model-len", type=click.IntRange(min=2), help="Longest prompt + output in tokens.")
@click.option(
    "--kv-memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="KV memory of each instance; absent: a part of what is free, at most 2.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of each instance; absent: as many as it has cores."
)
@click.option("--tls", is_flag=True, help="Everybody speaks mTLS, by a CA that is made for this stack.")
@click.option(
    "--pin/--no-pin", default=True, show_default=True, help="Give every instance cores of its own, if there are enough."
)
@click.option(
    "--router-arg",
    "router_args",
    multiple=True,
    metavar="FLAG=VALUE",
    help="A further flag for the router (see python -m router --help).",
)
@click.option(
    "--instance-arg",
    "instance_args",
    multiple=True,
    metavar="FLAG=VALUE",
    help="A further flag for every instance (see python -m decode_service --help).",
)
@click.option("--try/--no-try", "try_it", default=True, show_default=True, help="Generate a few words once it is up.")
def command(
    *,
    model: str,
    connector: str,
    disaggregation: Disaggregation,
    autoscale: tuple[str, ...],
    kv_memory: float | None,
    try_it: bool,
    **sizes: object,
) -> None:
    """Start a router and its prefill and decode instances on this machine.

    It stays up until Ctrl-C, which ends every process and removes every file it made. An instance or router that dies
    is started again after 0.5 s, then 1 s, 2 s … 8 s; one that dies more than five times within a minute, or
    before it was ready for the first time, ends the stack with the last lines of its log.

    \b
    Examples:
      tandem up                                        the demo model, 1 prefill + 1 decode
      tandem up --prefill 2 --decode 2 --port 50051
      tandem up --model Qwen/Qwen3-0.6B --dtype bfloat16 --kv-memory 2
      tandem up --prefill 0                            one instance that does both: the baseline
      tandem up --tls                                  every connection encrypted, both ends certified
      tandem up --autoscale decode=1..3                a decode pool that follows the load
      tandem up --connector redis --kv-url redis://127.0.0.1:6379/0
      tandem up --prefill 2 --connector nixl,redis --kv-url redis://127.0.0.1:6379/0
      tandem up --connector lmcache                    LMCache's disk format, in the stack's own folder
      tandem up --instance-arg=--max-num-seqs=16       any flag of the services
    """
    try:
        settings = StackSettings(
            model=resolve(model),
            model_name="demo" if model == "demo" else display_name(model),
            connector=connector,
            disaggregation=disaggregation,
            kv_cache_bytes=None if kv_memory is None else int(kv_memory * 2**30),
            **sizes,  # type: ignore[arg-type]  # the options above carry the names and kinds of the fields
        )
        settings = autoscaled(settings, parse_bounds(autoscale))
    except (ModelNotFound, ValueError) as error:
        raise click.ClickException(str(error)) from None
    _check_addresses(settings)
    _run(settings, model, try_it)


def _known_connector(value: str) -> str:
    for name in value.split(","):
        if name not in CONNECTORS and ":" not in name:
            raise click.BadParameter(f"{name!r} is none of {', '.join(CONNECTORS)}, nor module:Class of your own")
    from instance.connectors import check_names  # late: `--help` needs none of it

    try:
        return check_names(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _check_addresses(settings: StackSettings) -> None:
    """What would otherwise be said by a member, after seconds and in its own words."""
    _check_port(settings.host, "--port", settings.port)
    _check_port(settings.host, "--http-port", settings.http_port or 0)
    if settings.port and settings.port == settings.http_port:
        raise click.ClickException(f"--port and --http-port are both {settings.port}; choose another --http-port")
    if settings.kv_url is None:
        return
    server = urlsplit(settings.kv_url)
    is_lmcache = server.scheme == "tcp"
    try:
        host, port = server.hostname or "127.0.0.1", server.port or (5555 if is_lmcache else 6379)
        socket.create_connection((host, port), timeout=2).close()
    except (OSError, ValueError) as error:
        what, start = ("lmcache server", "see docs/connectors/lmcache.md") if is_lmcache else ("Redis", _START_REDIS)
        raise click.ClickException(f"no {what} answers at --kv-url {settings.kv_url}: {error}; {start}") from None


def _check_port(host: str, flag: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                raise click.ClickException(f"port {port} is taken; choose another {flag}, or none") from None
            raise click.ClickException(f"cannot listen on --host {host}: {error.strerror}") from None


class _Interrupted(Exception):
    """Ctrl-C, or its like, while the stack was starting."""


def _run(settings: StackSettings, model: str, try_it: bool) -> None:
    """Start, tell, watch, stop. The signal handler raises while starting and sets an event afterwards."""
    stop = threading.Event()
    starting = True

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal starting
        stop.set()
        if starting:
            starting = False  # a second one must not interrupt the clearing up
            raise _Interrupted

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    stack = LocalStack(settings)
    started_s = time.monotonic()
    try:
        _say(
            f"tandem up: {display_name(model)}, {_plural(settings.num_prefill, 'prefill')} + "
            f"{_plural(settings.num_decode, 'decode')}, KV by {settings.connector}"
        )
        _say("starting the router and all instances at once …")
        stack.start(lambda line: _say(f"  {line}"))
        stack.announce()
        if try_it:
            show_first_text(stack)
        starting = False
        _say(f"ready in {time.monotonic() - started_s:.1f} s")
        _say(how_to_call(stack))
        stack.serve(stop, _tell)
    except _Interrupted:
        pass
    except StackFailed as error:
        raise click.ClickException(str(error)) from None
    finally:
        starting = False
        stopping_s = time.monotonic()
        stack.stop()
        _say(f"stopped in {time.monotonic() - stopping_s:.1f} s; nothing is left behind")


def _tell(event: StackEvent) -> None:
    _say(event.what)
    for line in event.lines:
        _say(f"  | {line}")


def _plural(count: int, what: str) -> str:
    return f"{count} {what}"


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()
