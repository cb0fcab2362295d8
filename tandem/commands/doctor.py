"""`tandem doctor`: one line for each requirement, with what to do about it.

A check is a function that yields findings and changes nothing: ok, warn (it works, with less) or fail (it does not).
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from engine.checkpoint import ModelNotFound, check_checkpoint, display_name, resolve
from engine.errors import InvalidCheckpoint, to_install
from engine.machine import available_bytes, cpu_quota, usable_cores, visible_gpus
from tandem.client.registry import MAX_FOLDER_BYTES, temporary_folder
from tandem.commands.options import interruptible, kv_options
from tandem.connectors import CONNECTORS, ConnectorChoice, Options, split_connectors
from tandem.local_stack.preflight import IN_DOCKER, other_system

if TYPE_CHECKING:
    from tandem.client.credentials import Credentials
    from tandem.client.registry import RunningStack

_PR_GET_PDEATHSIG = 2
_LOW_MEMORY = 2 << 30
_LOW_SHM = 64 << 20
_SHOWN_PACKAGES = (
    "torch", "numpy", "numba", "safetensors", "tokenizers", "jinja2",
    "grpcio", "protobuf", "pyzmq", "msgspec", "pydantic", "blake3", "psutil", "click",
)  # fmt: skip
_EXTRAS = (
    ("huggingface_hub", "models by name from the Hugging Face hub", "hub"),
    ("xgrammar", "structured output and required tool calls", "structured-output"),
    ("nixl", "the nixl connector (memory to memory, RDMA, NVLink)", "nixl"),
)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_NUM_BLOCKS, _BLOCK_BYTES, _NUM_ROUNDS = 16, 1_843_200, 3
_RETRY = "then `tandem doctor` again"
_REMEDIES = {
    "refused": "start it, for example: redis-server --port 6379; or correct --kv-url",
    "resolve": "correct the host name in --kv-url",
    "timeout": "it is reachable but does not answer in time: check its load and the network",
    "unreachable": "check the network: is the host up, does a firewall block the port?",
    "tls": "--kv-url rediss://…, and --kv-options '{tls_ca_file: /path/ca.pem}'",
    "auth": "--kv-options '{username: name, password_file: /path}', or the variable TANDEM_REDIS_PASSWORD",
    "noperm": "allow the user: +getrange +set +del +strlen +pexpire +info +select +client|setname on ~tandem:*",
    "oom": "raise its maxmemory, or lower ttl_s in --kv-options",
    "no_primary": "check that the Sentinels know the service of --kv-url",
    "readonly": "give the primary's address by --kv-url",
    "cluster": "Redis Cluster is not supported: give the address of one server, or redis+sentinel://",
    "misconf": "it rejects writes because it cannot save to its disk: see Redis's log",
    "enospc": "free some space there, or give another --kv-folder",
    "eacces": "let this user write there, or give another --kv-folder",
    "erofs": "mount it writable, or give another --kv-folder",
    "nixl_remotedisconnect": "check that nothing here cuts loopback TCP; --kv-options '{ucx_tls: tcp}' tells more",
}
_OWN_FILES = (
    "the doctor uses the files that `tandem up` made for this stack: end it and start it again; "
    "with files of your own, ask by `tandem pools --ca-file FILE`"
)
_ONLY_TCP = "CMA is not permitted: sysctl kernel.yama.ptrace_scope=0; in containers, one user and one PID namespace"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy` is what to type or change."""

    verdict: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""


def _ok_or(verdict: Literal["warn", "fail"], is_ok: bool, subject: str, text: str, remedy: str) -> Finding:
    """`verdict` and `remedy` are of what is not ok."""
    return Finding("ok", subject, text) if is_ok else Finding(verdict, subject, text, remedy)


@click.command("doctor")
@click.option("--model", "model_name", default="demo", show_default=True, metavar="NAME", help="Model to check.")
@click.option(
    "--connector", default="shared_storage", show_default=True, metavar="NAME",
    help=f"Connector to move blocks through: {', '.join(CONNECTORS)}, module:Class of your own, or a list: nixl,redis.",
)  # fmt: skip
@click.option("--kv-url", metavar="URL", help="Its server: redis://host:port/0; for lmcache tcp://host:port.")
@click.option("--kv-folder", type=click.Path(path_type=Path), help="Its folder.  [default: as `tandem up` uses]")
@kv_options
@click.option("--quick", is_flag=True, help="Skip the connectors, whose checks move blocks and take some seconds.")
def command(
    model_name: str, connector: str, kv_url: str | None, kv_folder: Path | None, options: Options, quick: bool
) -> None:
    """Check this machine, the model, the connectors and a running stack.

    Every line is ok, warn (it works, with less) or fail, and says what to do. The exit status is 1 if a line says fail.
    Blocks move through the chosen connector, from another process to this one, and every byte is compared.

    \b
    Examples:
      tandem doctor
      tandem doctor --model ./Qwen3-0.6B
      tandem doctor --connector redis --kv-url redis://10.0.0.7:6379/0
      tandem doctor --connector nixl               which transport does UCX choose here?
      tandem doctor --kv-folder /mnt/shared        is the volume fast enough?
    """
    try:
        choices = split_connectors(connector, kv_url, kv_folder, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    checks = [check_system(), check_python(), check_packages()]
    if other_system() is None:  # the others ask Linux
        checks += [check_machine(), check_processor(), check_kernel(), check_compiler(), check_extras()]
        checks += [check_model(model_name)]
        checks += [] if quick else [check_connector(choice) for choice in choices]
        checks.append(check_running_stacks())
    num_failed = 0
    with interruptible() as check_interrupted:
        for finding in (finding for check in checks for finding in _guarded(check)):
            check_interrupted()
            num_failed += _show(finding)
    if num_failed:
        raise click.exceptions.Exit(1)


def _show(finding: Finding) -> bool:
    """Prints its line; whether it says fail."""
    click.secho(f"{finding.verdict:<5}", fg=_COLOURS[finding.verdict], nl=False)
    click.echo(f"{finding.subject:<16} {finding.text}" + (f"  → {finding.remedy}" if finding.remedy else ""))
    return finding.verdict == "fail"


def _guarded(check: Iterator[Finding]) -> Iterator[Finding]:
    """An exception in a check is a finding, not the end of the report."""
    try:
        yield from check
    except Exception as error:  # a broken package may raise anything when it is imported
        name = getattr(check, "__name__", "check").removeprefix("check_")
        remedy = "make install" if isinstance(error, ImportError) else ""
        yield Finding("fail", name, f"could not be checked: {type(error).__name__}: {error}", remedy)


def check_system() -> Iterator[Finding]:
    if (system := other_system()) is not None:
        yield Finding("fail", "system", f"a stack needs Linux, and this is {system}", IN_DOCKER)
    else:
        yield Finding("ok", "system", f"Linux {platform.release()} {platform.machine()}")


def check_python() -> Iterator[Finding]:
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)  # the sources may be run without installing them
    yield _ok_or("fail", is_supported, "python", platform.python_version(), "use Python 3.11, 3.12 or 3.13")


def check_packages() -> Iterator[Finding]:
    """Required packages, the main ones with versions, without importing them."""
    required = [one for one in importlib.metadata.requires("tandem-llm") or () if "extra ==" not in one]
    versions = {name: _version(name) for name in (re.split(r"[^\w-]", one)[0] for one in required)}
    if missing := [name for name, version in versions.items() if version is None]:
        yield Finding("fail", "packages", f"missing: {', '.join(missing)}", "make install")
    shown = [f"{name} {versions[name]}" for name in _SHOWN_PACKAGES if versions.get(name)]
    yield Finding("ok", "packages", ", ".join(shown))


def check_extras() -> Iterator[Finding]:
    for module, purpose, extra in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield Finding("warn", module, f"not installed; only needed for {purpose}", to_install(extra))
        else:
            yield Finding("ok", module, f"{_version(module.replace('_', '-')) or 'installed'}, for {purpose}")


def check_machine() -> Iterator[Finding]:
    cores, quota = usable_cores(), cpu_quota()
    text = f"{len(cores)} usable" + (f", of which the container grants {quota:g}" if quota is not None else "")
    remedy = "with fewer than two, prefill and decode take turns; tandem up --no-pin"
    yield _ok_or("warn", len(cores) >= 2 and (quota is None or quota >= 2), "cores", text, remedy)
    available = available_bytes()
    text, remedy = f"{available / 2**30:.1f} GiB free", "keep --kv-memory small, or free some"
    yield _ok_or("warn", available >= _LOW_MEMORY, "memory", text, remedy)


def check_processor() -> Iterator[Finding]:
    from engine.attention.compilation import has_fused_products

    if has_fused_products():
        yield Finding("ok", "processor", "multiplies and adds in one instruction (FMA)")
    else:
        text = "no FMA: the kernels multiply and add in two instructions, slower and with another rounding"
        yield Finding("warn", "processor", text, "in a virtual machine choose the CPU type host, or x86-64-v3")


def check_kernel() -> Iterator[Finding]:
    if _has_death_signal():
        yield Finding("ok", "death signal", "children end with their parent (PR_SET_PDEATHSIG)")
    else:
        remedy = "children watch a pipe instead; nothing to do"
        yield Finding("warn", "death signal", "not supported by this system", remedy)
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        yield Finding("warn", "/dev/shm", "missing or not writable", "the nixl connector needs it; mount a tmpfs there")
    elif (free := shutil.disk_usage(shm).free) < _LOW_SHM:
        remedy = "the nixl connector needs more; docker run --shm-size=1g"
        yield Finding("warn", "/dev/shm", f"{free >> 20} MiB free", remedy)
    else:
        yield Finding("ok", "/dev/shm", f"{free / 2**30:.1f} GiB free")
    temporary = temporary_folder()
    free = shutil.disk_usage(temporary).free
    text = f"{temporary}, {free / 2**30:.1f} GiB free"
    remedy = f"the local store lies there; set TMPDIR to a larger disk, by a path of at most {MAX_FOLDER_BYTES} bytes"
    yield _ok_or("warn", free > _LOW_MEMORY, "temporary files", text, remedy)


def check_compiler() -> Iterator[Finding]:
    """The C compiler that Triton calls at its first launch on a GPU."""
    subject, chosen = "C compiler", os.environ.get("CC")
    found = next(filter(None, map(shutil.which, ("gcc", "clang") if chosen is None else (chosen,))), None)
    if found is not None:
        yield Finding("ok", subject, f"{found}, for the kernels of GPUs")
        return
    text = "neither gcc nor clang is installed" if chosen is None else f"CC={chosen} is not found"
    remedy = "apt-get install gcc libc6-dev python3-dev, or give another one by CC"
    yield _ok_or("warn", not visible_gpus(), subject, f"{text}; only needed for --device cuda", remedy)


def check_model(name: str) -> Iterator[Finding]:
    """Whether the folder of `name` is a supported checkpoint with all its files. Reads no weights."""
    from engine.models.weights import check_files
    from engine.text.tokenizer import missing_tokenizer

    try:
        folder = resolve(name)
    except ModelNotFound as error:
        yield Finding("fail", "model", str(error), "see tandem up --help")
        return
    try:
        config = check_checkpoint(name, folder)
    except Exception as error:  # any error of the config is the finding
        yield Finding("fail", "model", str(error), "choose a model that is supported")
        return
    try:
        check_files(folder)
    except InvalidCheckpoint as error:
        yield Finding("fail", "model", str(error), "copy the checkpoint again")
        return
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if problem := missing_tokenizer(folder):
        text, _, remedy = problem.partition("; ")
        yield Finding("warn", "tokenizer", f"{text}: clients must send token ids", remedy)
    size = f"{num_bytes / 2**30:.2f} GiB" if num_bytes > 2**29 else f"{num_bytes / 2**20:.1f} MiB"
    context = config.max_model_len
    yield Finding("ok", "model", f"{display_name(name)}: {size} of weights, context {context}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_death_signal() -> bool:
    signum = ctypes.c_int()
    return bool(ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signum), 0, 0, 0) == 0)


def check_connector(choice: ConnectorChoice) -> Iterator[Finding]:
    """Moves blocks from another process to this one. Every error is a finding."""
    for finding in _connector_findings(choice):
        text, remedy = choice.one_line(finding.text), choice.one_line(finding.remedy)
        yield dataclasses.replace(finding, text=text, remedy=remedy)


def _connector_findings(choice: ConnectorChoice) -> Iterator[Finding]:
    from engine.errors import EngineError
    from kv_transfer.stores.base import StoreError
    from tandem.bench.transfer.endpoint import TransferFailed

    # Its messages come as findings.
    logging.getLogger("kv_transfer").addHandler(logging.NullHandler())
    try:
        if choice.name == "redis":
            yield from _check_redis(choice)
        yield from _check_transfer(choice)
    except StoreError as error:
        yield _failure(choice, f"no block can be moved: {error.reason}", error.reason)
    except TransferFailed as error:
        yield _failure(choice, f"blocks did not arrive: {error}", str(error))
    except (EngineError, OSError) as error:
        yield _failure(choice, str(error), "")
    except Exception as error:
        yield _failure(choice, f"{type(error).__name__}: {error}", "")


def _failure(choice: ConnectorChoice, text: str, reason: str) -> Finding:
    remedy = _REMEDIES.get(reason) or _REMEDIES.get(reason.removeprefix("store_"))
    if remedy is None and reason:
        remedy = "correct --connector, --kv-url, --kv-folder or --kv-options"
    remedy = remedy or "correct that"
    url = f"{choice.kv_url}: " if choice.kv_url is not None and choice.kv_url not in text else ""
    return Finding("fail", choice.name, url + text, f"{remedy}, {_RETRY}")


def _check_redis(choice: ConnectorChoice) -> Iterator[Finding]:
    """The version and the settings of the server."""
    from kv_transfer.stores.redis.connector import RedisStore, config_warnings
    from tandem.bench.transfer.media import RedisMedium

    assert choice.kv_url is not None
    store = RedisStore(RedisMedium(options=dict(choice.options), url=choice.kv_url).store_options())
    try:
        store.connect()
        info = store.info("memory", "replication", "server")
    finally:
        store.close()
    version = info.get("valkey_version") or info.get("redis_version") or "of unknown version"
    yield Finding("ok", choice.name, f"answers at {store.endpoint.address}, {version}")
    for warning in config_warnings(info):
        text, _, remedy = warning.partition(". ")
        yield Finding("warn", choice.name, text, remedy or "see Redis's documentation")


def _check_transfer(choice: ConnectorChoice) -> Iterator[Finding]:
    from tandem.bench.transfer.endpoint import Shape
    from tandem.bench.transfer.measure import measure
    from tandem.bench.transfer.media import medium_of

    if choice.name in ("shared_storage", "lmcache") and choice.kv_url is None and choice.kv_folder is None:
        choice = dataclasses.replace(choice, kv_folder=temporary_folder())
    medium = medium_of(choice)
    medium.num_connections = 1
    shape = Shape(_NUM_BLOCKS, _BLOCK_BYTES)
    digest = "on" if choice.options.get("digest", True) else "off"
    result = measure(medium, shape, digests=[digest], num_rounds=_NUM_ROUNDS, progress=lambda text: None)
    figures = result.figures[0]
    save, share = result.save_gb_s(figures), result.share(figures)
    text = f"{shape.num_blocks} blocks of {shape.block_bytes / 1e6:.2f} MB from one process to another"
    text += f" over {result.location}" if result.location else ""
    text += f": saved at {save:.2f} GB/s," if save is not None else ":"
    checked = {"on": "verified", "off": "compared (digests off)"}.get(figures.way, "compared")
    text += f" read and {checked} at {result.gb_s(figures):.2f} GB/s"
    text += f" ({share:.0%} of the medium's raw rate)" if share is not None else ""
    yield Finding("ok", choice.name, text)
    yield from _check_speed(choice.name, share, result.goals.get(figures.way))
    if choice.name == "nixl" and "TCP" in result.location and not choice.options.get("ucx_tls"):
        yield Finding("warn", choice.name, "UCX moves pages over TCP, some 5 times slower than memory", _ONLY_TCP)


def _check_speed(connector: str, share: float | None, goal: float | None) -> Iterator[Finding]:
    """A warning for a connector that reaches less of its medium's raw rate than it should."""
    if share is not None and goal is not None and share < goal:
        text = f"{share:.0%} of the medium's raw rate; on an idle machine it is {goal:.0%} or more"
        remedy = f"close other programs, then tandem bench transfer --connector {connector}"
        yield Finding("warn", connector, text, remedy)


def check_running_stacks() -> Iterator[Finding]:
    from tandem.client.registry import running_stacks

    stacks = running_stacks()
    if not stacks:
        yield Finding("ok", "running stack", "none (start one with `tandem up`)")
        return
    for stack in stacks:
        try:
            yield from _stack_findings(stack)
        except ValueError as error:  # a file of its credentials is damaged
            yield Finding("fail", "router", f"at {stack.address}: {error}", _OWN_FILES)


def _stack_findings(stack: RunningStack) -> Iterator[Finding]:
    from tandem.client.channel import ROUTER_SERVICE
    from tandem.client.credentials import stack_credentials
    from tandem.client.health import health

    credentials = stack_credentials(Path(stack.folder))
    state = health(stack.address, ROUTER_SERVICE, credentials=credentials)
    yield _process_finding("router", stack.address, state, credentials=credentials)
    for name, address in stack.instances.items():
        yield _instance_finding(name, address, credentials)


def _instance_finding(name: str, address: str, credentials: Credentials) -> Finding:
    """Its health and load. It may end at any time."""
    import grpc

    from tandem.client.health import INSTANCE_SERVICE, READY, dtype, health, load, silent

    state, detail = health(address, INSTANCE_SERVICE, credentials=credentials), ""
    if state == READY:
        try:
            report, kind = load(address, credentials=credentials), dtype(address, credentials=credentials)
        except grpc.RpcError as error:
            return _process_finding(name, address, silent(error))
        blocks = report.blocks
        total = sum(value for _, value in blocks.ListFields())
        detail = (
            f", {kind}, {report.num_running} running, {report.num_waiting} waiting, "
            f"{blocks.running + blocks.held + blocks.quarantined} of {total} blocks in use"
        )
    return _process_finding(name, address, state, detail, credentials)


def _process_finding(
    name: str, address: str, state: str, detail: str = "", credentials: Credentials | None = None
) -> Finding:
    from tandem.client.errors import tls_problem
    from tandem.client.health import READY, SILENT

    if credentials and state == f"{SILENT} (UNAVAILABLE)" and (problem := tls_problem(address, credentials)):
        return Finding("fail", name, problem, _OWN_FILES)
    remedy = "see its log in the stack's folder; `tandem up` restarts dead processes"
    return _ok_or("fail", state == READY, name, f"{state} at {address}{detail}", remedy)
