"""`tandem up`: a stack on this machine, from nothing to text on the screen, until Ctrl-C."""

from __future__ import annotations

import _thread
import math
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from engine.checkpoint import check_checkpoint, display_name, resolve, resolve_adapter
from engine.config import MAX_THREADS
from tandem.client.registry import has_proxy, made_state_dir
from tandem.commands.options import MAX_GIB, Choice, FloatRange, IntRange, end_signals, read_stack_file
from tandem.connectors import CONNECTORS, ConnectorChoice
from tandem.local_stack.desired_state import MAX_SIZE
from tandem.local_stack.preflight import IN_DOCKER, check_addresses, check_vllm, given_settings, other_system
from tandem.local_stack.settings import MAX_ROUTER_WORKERS, Disaggregation, StackSettings, autoscaled, parse_bounds
from tandem.local_stack.stack import LocalStack, StartCancelled
from tandem.local_stack.supervisor import StackFailed
from tandem.local_stack.topology import check_gpus

if TYPE_CHECKING:
    from engine.config import EngineKind
    from engine.models.config import DecoderConfig
    from tandem.client.completion import Usage
    from tandem.client.credentials import Credentials

_API_KEY = "TANDEM_API_KEY"
_GIB = 2**30
_MIN_KV_TOKENS = 32
"""Two blocks."""
_DEMO_PROMPT = """\
Once upon a time there was a penguin called Penny who had a tandem, but nobody to sit on the back of it. Then Dex the \
dachshund came by. Penny lived above the bicycle shop and was known for one thing: she reads the whole map in one look.

They wanted to ride to the sea, but in between stood a hill. "I will steer," said Penny."""
"""Long enough for a prefill instance, so that the first text passes through both pools."""
_DEMO_TOKENS = 60


@click.command("up")
@click.option(
    "--config", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), is_eager=True, expose_value=False,
    callback=lambda context, option, value: read_stack_file(context, value),
    help="YAML file with these options, `decode: 2`; those of the command line win.",
)  # fmt: skip
@click.option(
    "--prefill", "num_prefill", type=IntRange(0, MAX_SIZE), default=1, show_default=True,
    help="Prefill instances; 0 serves without disaggregation.",
)  # fmt: skip
@click.option(
    "--decode", "num_decode", type=IntRange(1, MAX_SIZE), default=1, show_default=True, help="Decode instances."
)
@click.option(
    "--autoscale", multiple=True, metavar="POOL=MIN..MAX",
    help="Let this pool grow and shrink with the load, as in decode=1..3; may be given for both pools.",
)  # fmt: skip
@click.option(
    "--model", default="demo", show_default=True, metavar="NAME",
    help="demo, a checkpoint's folder, or owner/name on the Hugging Face hub.",
)  # fmt: skip
@click.option(
    "--engine", type=Choice(["tandem", "vllm"]), default="tandem", show_default=True,
    help="Engine of the instances. vllm runs more models, and on GPUs: docs/vllm.md.",
)  # fmt: skip
@click.option(
    "--engine-python", metavar="FILE",
    help="Interpreter of an environment with vLLM, for --engine vllm; absent: this one.",
)  # fmt: skip
@click.option("--served-model-name", metavar="NAME", help="Name of the model in requests; absent: --model's last part.")
@click.option(
    "--connector", default="shared_storage", show_default=True, metavar="NAME",
    callback=lambda context, option, value: _check_connector(value),
    help="How KV moves from prefill to decode: shared_storage, redis, nixl, lmcache, or module:Class of your own. "
    "Several, as in nixl,redis: the first hands over, the others store prefixes that all prefill instances share.",
)  # fmt: skip
@click.option(
    "--kv-url", metavar="URL",
    help="Server of redis: redis://host:port/0. Of lmcache: tcp://host:port; absent, lmcache is on disk.",
)  # fmt: skip
@click.option(
    "--disaggregation", type=Choice(["always", "auto", "never"]), default="auto", show_default=True,
    help="auto: each prompt where it costs least: one instance alone, of either pool, or split over both.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=IntRange(0, 65535), default=0,
    help="Port of the router; 0 chooses one, the same at each start while it is free and this user has no other "
    "stack.  [default: 0]",
)  # fmt: skip
@click.option(
    "--http-port", type=IntRange(0, 65535), default=0,
    help="Port of the router's OpenAI API; 0 chooses one in the same way.  [default: 0]",
)  # fmt: skip
@click.option(
    "--dtype", type=Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Of weights and KV; absent: the checkpoint's own.",
)  # fmt: skip
@click.option(
    "--model-impl", type=Choice(["auto", "native", "transformers"]), default="auto", show_default=True,
    help="What computes the model: the built-in decoder, transformers, or auto: transformers where there is no "
    "native decoder.",
)  # fmt: skip
@click.option(
    "--quantization", type=Choice(["none", "int8", "int4"]), default="none", show_default=True,
    help="Bits of the weights of linear layers: a half or a quarter of the memory of bfloat16, and less exact.",
)  # fmt: skip
@click.option(
    "--lora-adapter", "lora_adapters", multiple=True, metavar="NAME=FOLDER",
    callback=lambda context, option, value: _by_name(value),
    help="A LoRA adapter in PEFT's form, a folder or owner/name on the hub, and the name by which requests choose it; "
    "may be given several times.",
)  # fmt: skip
@click.option(
    "--device", type=Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="cuda: each instance on a GPU of its own; fewer are shared, which requires --kv-memory. Several ranks: each "
    "on a GPU, without a KV connector only (docs/gpu.md). With --engine vllm its build decides.",
)  # fmt: skip
@click.option(
    "--tensor-parallel-size", type=IntRange(min=1), default=1, show_default=True,
    help="Processes of each instance that divide every layer.",
)  # fmt: skip
@click.option(
    "--pipeline-parallel-size", type=IntRange(min=1), default=1, show_default=True,
    help="Stages of each instance that divide the layers.",
)  # fmt: skip
@click.option("--max-model-len", type=IntRange(min=2), help="Longest prompt + output in tokens.")
@click.option(
    "--kv-memory", type=FloatRange(min=0, min_open=True, max=MAX_GIB), metavar="GIB",
    help="KV memory of each instance; absent: a part of the free memory, at most 2; of a GPU, what is left of 90 %.",
)  # fmt: skip
@click.option(
    "--threads", type=IntRange(1, MAX_THREADS),
    help="Threads of each instance, divided among its ranks; absent: one for each of its cores, "
    "within a container's CPU limit.",
)  # fmt: skip
@click.option(
    "--api-key", metavar="KEY", envvar=_API_KEY, show_envvar=True,
    callback=lambda context, option, value: _check_api_key(value),
    help="Clients must send it as bearer token; commands of this user on this machine do. Absent: no token is "
    "required. Other users see a command line, not the environment.",
)  # fmt: skip
@click.option("--tls", is_flag=True, help="Encrypts all connections with mTLS, using a CA generated for this stack.")
@click.option(
    "--pin/--no-pin", default=True, show_default=True, help="Give every instance its own cores, if there are enough."
)
@click.option(
    "--router-workers", type=IntRange(1, MAX_ROUTER_WORKERS), default=1, show_default=True,
    help="Processes of the router, which share its ports and fixed limits; one takes up to a core.",
)  # fmt: skip
@click.option(
    "--router-arg", "router_args", multiple=True, metavar="FLAG=VALUE",
    help="A further flag for the router (see python -m router --help).",
)  # fmt: skip
@click.option(
    "--instance-arg", "instance_args", multiple=True, metavar="FLAG=VALUE",
    help="A further flag for every instance (see python -m decode_service --help).",
)  # fmt: skip
@click.option(
    "--try/--no-try", "try_it", default=True, show_default=True, help="Generate a short text once the stack is up."
)
def command(
    *,
    model: str,
    engine: EngineKind,
    served_model_name: str | None,
    connector: str,
    disaggregation: Disaggregation,
    autoscale: tuple[str, ...],
    kv_memory: float | None,
    try_it: bool,
    **sizes: object,
) -> None:
    """Start a router and its prefill and decode instances on this machine.

    It runs until Ctrl-C, which ends every process and removes every file of the stack. An instance or router that exits
    is restarted after 0.5 s, then 1 s, 2 s … 8 s; one that exits more than five times within a minute, or before all
    are ready for the first time, ends the stack with the last lines of its log. An instance that a resize adds ends
    alone if it cannot start or exits six times before it is ready.

    The log of each process keeps its newest lines, at most about 64 MiB.

    \b
    Examples:
      tandem up                                        the demo model, 1 prefill + 1 decode
      tandem up --prefill 2 --decode 2 --port 50051
      tandem up --model Qwen/Qwen3-0.6B --dtype bfloat16 --kv-memory 2
      tandem up --model Qwen/Qwen3-0.6B --lora-adapter sql=adapters/sql
      tandem up --device cuda --model Qwen/Qwen3-8B --connector nixl --prefill 1 --decode 3
      tandem up --prefill 0                            one instance that does both: the baseline
      TANDEM_API_KEY=$KEY tandem up --host 0.0.0.0     clients of other machines, with a token
      tandem up --config stack.yaml --decode 3         options from a file, and one above it
      tandem up --tls                                  mTLS on every connection
      tandem up --autoscale decode=1..3                a decode pool that follows the load
      tandem up --connector redis --kv-url redis://127.0.0.1:6379/0
      tandem up --prefill 2 --connector nixl,redis --kv-url redis://127.0.0.1:6379/0
      tandem up --engine vllm --engine-python .venv-vllm/bin/python --instance-arg=--block-size=32
      tandem up --connector lmcache                    LMCache's disk format, in the stack's own folder
      tandem up --instance-arg=--max-num-seqs=16       any flag of the services
    """
    if (system := other_system()) is not None:
        raise click.ClickException(f"a stack needs Linux, and this is {system}; {IN_DOCKER}")
    from engine.errors import EngineError
    from engine.models import check_adapters, check_ranks
    from engine.text.tokenizer import missing_tokenizer

    try:
        vllm_gpus = check_vllm(str(sizes["engine_python"] or sys.executable)) if engine == "vllm" else None
        settings = StackSettings(
            model=resolve(model),
            engine=engine,
            vllm_gpus=vllm_gpus,
            model_name=served_model_name or ("demo" if model == "demo" else display_name(model)),
            connector=connector,
            disaggregation=disaggregation,
            kv_cache_bytes=None if kv_memory is None else int(kv_memory * _GIB),
            port_seed=zlib.crc32(bytes(made_state_dir())),
            **sizes,  # type: ignore[arg-type]  # the options above carry the names and kinds of the fields
        )
        settings = autoscaled(settings, parse_bounds(autoscale))
        adapters = {name: str(resolve_adapter(folder)) for name, folder in settings.lora_adapters.items()}
        settings = replace(settings, lora_adapters=adapters)
        given_settings(settings.instance_args)  # raises for flags or variables with which no instance starts
        needs_weights = not _may_be_dummy(settings.instance_args)
        config = None  # vLLM checks its models itself
        if engine == "tandem":
            impl = settings.model_impl
            config = check_checkpoint(model, settings.model, model_impl=impl, needs_weights=needs_weights)
            check_ranks(config, settings.parallelism)
        check_adapters(config, settings.lora_adapters)
        check_addresses(settings)
        check_gpus(settings)
    except (EngineError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if config is not None:
        _check_sizes(settings, config)
    if needs_weights and (problem := missing_tokenizer(settings.model)):
        click.echo(f"Warning: requests must have token ids, no text and no chats: {problem}", err=True)
    _run_stack(settings, model, try_it)


def _check_api_key(value: str | None) -> str | None:
    """click takes an empty variable for an absent one, and the stack would be open to every client."""
    if value is None and os.environ.get(_API_KEY) == "":
        raise click.UsageError(f"{_API_KEY} is empty: set it to a key, or `unset {_API_KEY}` for a stack without one")
    return value


def _by_name(given: Sequence[str]) -> dict[str, str]:
    """NAME=FOLDER as folders by name. Nothing is fetched here: a shell's completion parses options too."""
    pairs = [one.partition("=") for one in given]
    if wrong := next((one for one, (name, _, folder) in zip(given, pairs, strict=True) if not (name and folder)), None):
        raise click.BadParameter(f"{wrong!r} must be NAME=FOLDER, as in sql=adapters/sql")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise click.BadParameter("an adapter's name is given twice")
    return {name: folder for name, _, folder in pairs}


def _check_connector(value: str) -> str:
    if value in CONNECTORS:
        return value
    from instance.settings import check_names  # late: it takes half a second

    try:
        for name in value.split(","):
            ConnectorChoice(name)
        return check_names(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _may_be_dummy(instance_args: Sequence[str]) -> bool:
    """Whether the instances' settings may ask for random weights."""
    flags = ("--load-format", "--model-load-format", "--config")
    return "TANDEM_MODEL__LOAD_FORMAT" in os.environ or any(arg.startswith(flags) for arg in instance_args)


def _check_sizes(settings: StackSettings, config: DecoderConfig) -> None:
    """Reports by the flags' names what the model and this machine's memory do not allow."""
    length, limit = settings.max_model_len, config.max_model_len
    if length is not None and length > limit:
        raise click.ClickException(f"--max-model-len {length} exceeds the model's limit of {limit} tokens")
    if (num_bytes := settings.kv_cache_bytes) is None:
        return
    from engine.machine import available_bytes

    free, num_instances = available_bytes(), settings.num_prefill + settings.num_decode
    given = f"--kv-memory {num_bytes / _GIB:.6g}"
    if settings.device == "cpu" and num_bytes * num_instances > free:
        most = math.floor(free / num_instances / _GIB * 1000) / 1000
        advice = f"at most --kv-memory {most:.12g}" if most else "start fewer instances"
        raise click.ClickException(
            f"{given}: {num_instances} instances need {num_bytes * num_instances / _GIB:.1f} GiB for their KV, and "
            f"{free / _GIB:.1f} GiB are free; {advice}"
        )
    token_bytes = config.kv_layout(dtype=settings.dtype or "auto", block_size=1).bytes_per_block  # type: ignore[arg-type]
    num_tokens, needed = num_bytes // token_bytes, length or _MIN_KV_TOKENS
    if num_tokens < needed:
        why = f"--max-model-len {length} needs" if length else "a stack needs"
        gib = -(-needed * token_bytes * 1000 // _GIB) / 1000
        raise click.ClickException(f"{given} has room for {num_tokens} tokens; {why} --kv-memory {gib:g}")


class StopSignals:
    """Ctrl-C and similar signals: the first one during the start of `stack` raises StartCancelled; later ones, and
    those during the cleanup of a start that failed, set `stop`."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self.stop = threading.Event()
        self.raises = True

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        # In a thread: the interrupted one may hold the event's lock, which is not reentrant. So is the lock that
        # `threading.Thread.start` takes, which the interrupted one may be in.
        _thread.start_new_thread(self.stop.set, ())
        if self.raises and not self._stack.is_stopping:
            self.raises = False  # a second signal must not interrupt the cleanup
            raise StartCancelled

    def install(self) -> None:
        """Handles the signals of this process from now on."""
        for number in end_signals():
            signal.signal(number, self)
        sys.unraisablehook = _show_unraisable


def _show_unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Python loses an exception that is raised while a callback of a library runs, and would print its traceback: of a
    cancelled start it is no news, since `stop` is set too."""
    if not isinstance(lost.exc_value, StartCancelled):
        sys.__unraisablehook__(lost)


def _run_stack(settings: StackSettings, model: str, try_it: bool) -> None:
    stack = LocalStack(settings)
    signals = StopSignals(stack)
    signals.install()
    started_s = time.monotonic()
    try:
        click.echo(
            f"tandem up: {display_name(model)}, {settings.num_prefill} prefill + {settings.num_decode} decode, "
            + (f"KV by {settings.connector}" if settings.engine == "tandem" else f"engine {settings.engine}")
        )
        click.echo("starting the router and all instances …")
        # With `stop` too: the exception may get lost (`_show_unraisable`).
        stack.start(lambda line: click.echo(f"  {line}"), signals.stop)
        stack.announce()
        if try_it:
            _show_first_text(stack.address, stack.credentials)
        signals.raises = False
        click.echo(f"ready in {time.monotonic() - started_s:.1f} s")
        click.echo(usage_text(stack))
        stack.serve(signals.stop, lambda event: _echo("\n  | ".join([event.text, *event.lines])))
    except StartCancelled:
        pass
    except BrokenPipeError:
        raise
    except (StackFailed, OSError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        signals.raises = False
        stopping_s = time.monotonic()
        stack.stop()
        _echo(f"stopped in {time.monotonic() - stopping_s:.1f} s; all processes and files are removed")


def _echo(text: str) -> None:
    """Ignores a full disk and a terminal that is gone: the stack goes on. Raises BrokenPipeError."""
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError:
        pass


def _show_first_text(address: str, credentials: Credentials) -> None:
    """Streams the answer to one request through the whole stack. A request that fails is reported and ends nothing."""
    from tandem.client.client import Client
    from tandem.client.completion import Usage
    from tandem.client.errors import TandemError

    usage: Usage | None = None
    try:
        with Client(address, timeout_s=60, credentials=credentials) as client:
            for piece in client.stream(_DEMO_PROMPT, max_tokens=_DEMO_TOKENS, temperature=0.0):
                if usage is None:
                    usage = Usage()
                    click.secho(f"\n{_DEMO_PROMPT}", bold=True, nl=False)
                click.echo(piece.text, nl=False)
                usage = piece.usage or usage
    except TandemError as error:
        click.echo(f"\n(no example text: {error.message})\n")
        return
    except StartCancelled:
        click.echo(" …")
        raise
    click.echo(f" …\n\n{_hand_over_text(usage or Usage())}")


def _hand_over_text(usage: Usage) -> str:
    if not usage.external_tokens:
        return f"({usage.prompt_tokens} prompt tokens, served by one instance alone)"
    split = f"{usage.external_tokens} of {usage.prompt_tokens} prompt tokens"
    return f"({split} were prefilled by one instance and handed over to another, which generated the rest)"


def typed_command() -> str:
    """How a shell here finds this command: its path, as it was called, where the environment is not activated."""
    called = sys.argv[0]
    return called if Path(called).name == "tandem" and shutil.which("tandem") is None else "tandem"


def usage_text(stack: LocalStack) -> str:
    """The addresses of all processes, and commands to try."""
    address, ca_file, key_file = stack.address, stack.credentials.ca_file, stack.credentials.token_file
    token = "" if key_file is None else f""" -H "Authorization: Bearer $(cat {key_file})\""""
    grpcurl_tls, curl_tls = ("-plaintext", "") if ca_file is None else (f"-cacert {ca_file}", f"--cacert {ca_file} ")
    http = f"{'http' if ca_file is None else 'https'}://{stack.http_address}"
    # A proxy of the environment cannot reach this machine; curl would call it even for loopback.
    grpcurl, no_proxy = ("NO_PROXY='*' grpcurl", " --noproxy '*'") if has_proxy() else ("grpcurl", "")
    grpcurl += f" {grpcurl_tls}{token}"
    lines = [f"  {name:<11} {process.spec.address}" for name, process in stack.processes.items()]
    if stack.http_address is not None:
        lines.append(f"  OpenAI API  {http}/v1")
    where = "in `tandem top`"
    if stack.settings.has_page:
        where = "on the live page"
        lines.append(f"  live page   {http}/" + (f"   (it asks for the key in {key_file})" if key_file else ""))
    lines += [
        f"  admin       {stack.admin_address}   (tandem pools)",
        f"  logs        {stack.folder / 'logs'}",
        "",
        "Call it, from another terminal:",
        f'  {typed_command()} generate --chat "What is a tandem?"',
        f"  {typed_command()} bench serve --rate 1 --duration 60   (load, to be seen {where})",
        "",
        "from Python:",
        "  from tandem import Client",
        f'  print(Client("{address}").generate("Once upon a time", max_tokens=32).text)',
        "",
        "from any gRPC client:",
        f"""  {grpcurl} -d '{{"text": "Once upon a time", "sampling": {{"max_tokens": 32}}}}' \\""",
        f"    {address} tandem.v1.GenerationService/Generate",
        "",
    ]
    if stack.http_address is not None:
        lines += [
            "from any OpenAI client:",
            f"  curl {curl_tls}{http}/v1/chat/completions{token}{no_proxy} \\",
            "    -H 'Content-Type: application/json' \\",
            """    -d '{"messages": [{"role": "user", "content": "What is a tandem?"}], "max_tokens": 32}'""",
            "",
        ]
    return "\n".join([*lines, "Ctrl-C ends it."])
