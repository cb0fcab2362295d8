"""The router's settings: one section per concern, read once by the composition root."""

from __future__ import annotations

from typing import Literal

from serving.channel import ChannelSettings
from serving.logging import LogSettings
from serving.server import ServerSettings
from serving.settings import Section, Settings, setting


class RouterSection(Section):
    """What this router serves, and where."""

    listen: str | None = setting(
        None, "host:port to listen on; wins over server.host and server.port.", flag="--listen"
    )
    model: str = setting(..., "Folder with the model's tokenizer and generation_config.json.", flag="--model")
    model_name: str | None = setting(None, "Name clients know the model by; none: the folder's.", flag="--model-name")
    ready_file: str | None = setting(None, "File that gets the line `ready address=host:port`.", flag="--ready-file")


class PoolSettings(Section):
    """The instances, and when one counts as gone."""

    prefill: str = setting("", "Prefill instances: host:port, comma-separated.", flag="--prefill")
    decode: str = setting("", "Decode instances: host:port, comma-separated.", flag="--decode")
    check_tokenizer: bool = setting(True, "Leave out instances whose tokenizer files differ from the router's.")
    beat_timeout_s: float = setting(2.0, "Seconds without a load report after which an instance is out.", gt=0)
    core_silence_timeout_s: float = setting(
        2.0, "Seconds of silence of an engine core after which its instance is out, or 20 of its steps if longer.", gt=0
    )
    settle_s: float = setting(
        1.0,
        "Seconds that a starting router which could serve waits for the rest of its instances before it is ready.",
        ge=0,
    )
    min_backoff_s: float = setting(0.1, "First wait in seconds before an instance is tried again.", gt=0)
    max_backoff_s: float = setting(0.5, "Longest wait in seconds before an instance is tried again.", ge=0.1)

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        return _addresses(self.prefill)

    @property
    def decode_addresses(self) -> tuple[str, ...]:
        return _addresses(self.decode)


class DisaggregationSettings(Section):
    """When a request is split between the pools."""

    mode: Literal["always", "auto", "never"] = setting(
        "auto", "Split requests always, where it pays, or never.", flag="--disaggregation"
    )
    min_tokens: int = setting(64, "In auto: longest prompt in tokens that the decode instance prefills itself.", ge=0)
    lease_s: float = setting(30.0, "Seconds that a prefill instance holds KV without a sign of its reader.", gt=0)
    reservation_s: float = setting(
        30.0, "Seconds that a decode instance keeps blocks reserved without KV or seed.", gt=0
    )
    reserve_timeout_s: float = setting(10.0, "Seconds to wait for a decode instance's reservation.", gt=0)


class AdmissionSettings(Section):
    """What the router takes on at one time."""

    max_requests: int = setting(1024, "Requests in flight at this router.", ge=1)
    max_tokens: int = setting(
        1 << 23, "Prompt and output tokens of the requests in flight, every choice counted.", ge=1
    )
    retry_after_s: float = setting(1.0, "Seconds after which a refused client may try again.", gt=0)


class FailoverSettings(Section):
    """How often a request moves to other instances before it is given up."""

    max_retries: int = setting(2, "Attempts in a row that may fail without a token before the request does.", ge=0)
    max_resumptions: int = setting(3, "Times that a stream that has begun goes on elsewhere.", ge=0)
    resume_wait_s: float = setting(5.0, "Seconds that a stream that has begun waits for an instance to go on at.", ge=0)


class RouterSettings(Settings):
    """The whole tree of `python -m router`."""

    router: RouterSection
    server: ServerSettings = ServerSettings()
    pools: PoolSettings = PoolSettings()
    channel: ChannelSettings = ChannelSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    admission: AdmissionSettings = AdmissionSettings()
    failover: FailoverSettings = FailoverSettings()
    log: LogSettings = LogSettings()

    @property
    def effective_server(self) -> ServerSettings:
        """The server's section with `router.listen` applied; raises ValueError when that is no host:port."""
        if self.router.listen is None:
            return self.server
        host, colon, port = self.router.listen.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"router.listen = {self.router.listen!r} is not host:port")
        return self.server.model_copy(update={"host": host.strip("[]"), "port": int(port)})


def _addresses(listed: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
