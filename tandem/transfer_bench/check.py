"""What `tandem doctor` says of the configured connector: whether blocks arrive through it whole, and how fast."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

from tandem.checks import Check, Finding
from tandem.running import temporary_folder
from tandem.transfer_bench.choice import ConnectorChoice, medium_of

_NUM_BLOCKS, _BLOCK_BYTES, _NUM_ROUNDS = 16, 1_843_200, 3
_RETRY = "then `tandem doctor` again"
_REMEDIES = {
    "refused": "start it, for example: redis-server --port 6379; or correct --kv-url",
    "resolve": "correct the host's name in --kv-url",
    "timeout": "it is reached and does not answer in time: look at its load, or the way there",
    "unreachable": "look at the way there: is the host up, does a firewall let the port through?",
    "tls": "--kv-url rediss://…, and --kv-options '{tls_ca_file: /path/ca.pem}'",
    "auth": "--kv-options '{username: name, password_file: /path}', or the variable TANDEM_REDIS_PASSWORD",
    "noperm": "allow the user: +getrange +set +del +strlen +pexpire +info +hello +select on ~tandem:*",
    "oom": "raise its maxmemory, or lower ttl_s in --kv-options",
    "readonly": "give the primary's address by --kv-url",
    "cluster": "a cluster is not supported: give the address of one server",
    "misconf": "it refuses writes since it cannot save to its disk: see Redis's log",
    "enospc": "free some space there, or another --kv-folder",
    "eacces": "let this user write there, or another --kv-folder",
    "erofs": "mount it writable, or another --kv-folder",
    "nixl_remotedisconnect": "see that nothing here cuts loopback TCP; --kv-options '{ucx_tls: tcp}' tells more",
}
_ONLY_TCP = "CMA is not permitted: sysctl kernel.yama.ptrace_scope=0; in containers, one user and one PID namespace"


def connector_check(choice: ConnectorChoice) -> Check:
    """Moves blocks from another process to this one. What it found is a finding; it raises nothing."""

    def check() -> Iterator[Finding]:
        for finding in _findings(choice):
            yield dataclasses.replace(
                finding, what=choice.redacted(finding.what), remedy=choice.redacted(finding.remedy)
            )

    return check


def _findings(choice: ConnectorChoice) -> Iterator[Finding]:
    from engine.errors import EngineError
    from kv_transfer.store import StoreError
    from tandem.transfer_bench.half import TransferFailed

    # What its parts have to say comes as findings.
    logging.getLogger("kv_transfer").addHandler(logging.NullHandler())
    try:
        if choice.name == "redis":
            yield from _survey(choice)
        yield from _move(choice)
    except StoreError as error:
        yield _failure(choice, f"no block can be moved: {error.reason}", error.reason)
    except TransferFailed as error:
        yield _failure(choice, f"blocks did not arrive: {error}", str(error))
    except (EngineError, OSError) as error:
        yield _failure(choice, str(error), "")
    except Exception as error:
        yield _failure(choice, f"{type(error).__name__}: {error}", "")


def _failure(choice: ConnectorChoice, what: str, reason: str) -> Finding:
    remedy = _REMEDIES.get(reason) or _REMEDIES.get(reason.removeprefix("store_"))
    if remedy is None and reason:
        remedy = "correct --connector, --kv-url, --kv-folder or --kv-options"
    remedy = remedy or "correct that"
    where = f"{choice.kv_url}: " if choice.kv_url is not None and choice.kv_url not in what else ""
    return Finding("fail", choice.name, where + what, f"{remedy}, {_RETRY}")


def _survey(choice: ConnectorChoice) -> Iterator[Finding]:
    """What there is to say about the server's set-up."""
    from kv_transfer.redis_connector import make_store
    from kv_transfer.redis_survey import survey
    from tandem.transfer_bench.server_media import RedisMedium

    assert choice.kv_url is not None
    store = make_store(RedisMedium(options=dict(choice.options), url=choice.kv_url).store_options())
    try:
        store.connect()
        info = {**store.info("memory"), **store.info("replication"), **store.info("server")}
    finally:
        store.close()
    version = info.get("valkey_version") or info.get("redis_version") or "of unknown version"
    yield Finding("ok", choice.name, f"answers at {store.dialer.address}, {version}")
    for warning in survey(info):
        what, _, remedy = warning.partition(". ")
        yield Finding("warn", choice.name, what, remedy or "see docs of Redis")


def _move(choice: ConnectorChoice) -> Iterator[Finding]:
    from tandem.transfer_bench.half import Shape
    from tandem.transfer_bench.measure import measure

    if choice.name in ("shared_storage", "lmcache") and choice.kv_url is None and choice.kv_folder is None:
        choice = dataclasses.replace(choice, kv_folder=temporary_folder())
    medium = medium_of(choice)
    medium.num_lives = 1
    shape = Shape(_NUM_BLOCKS, _BLOCK_BYTES)
    digest = "on" if choice.options.get("digest", True) else "off"
    result = measure(medium, shape, digests=[digest], num_rounds=_NUM_ROUNDS, say=lambda what: None)
    ours = result.figures[0]
    save, share = result.save_gb_s(ours), result.share(ours)
    what = f"{shape.num_blocks} blocks of {shape.block_bytes / 1e6:.2f} MB from one process to another"
    what += f" over {result.where}" if result.where else ""
    what += f": saved at {save:.2f} GB/s," if save is not None else ":"
    what += f" read and {'verified' if digest == 'on' else 'compared (digests off)'} at {result.gb_s(ours):.2f} GB/s"
    what += f" ({share:.0%} of what the medium gives)" if share is not None else ""
    yield Finding("ok", choice.name, what)
    if choice.name == "nixl" and "TCP" in result.where and not choice.options.get("ucx_tls"):
        yield Finding("warn", choice.name, "UCX moves pages over TCP, some 5 times slower than memory", _ONLY_TCP)
