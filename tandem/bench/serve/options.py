"""The options of `tandem bench serve`, checked as a whole, and the endpoint and workload made from them."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tandem.bench.serve.endpoint import Endpoint, PlannedRequest, ServedModel
from tandem.bench.serve.load import Sweep
from tandem.bench.serve.report import Objectives
from tandem.bench.serve.traces import MAX_LEN, TooLong, TraceUse, check_lengths, read_trace
from tandem.bench.serve.workload import (
    MAX_REQUESTS,
    Lengths,
    RandomWorkload,
    Schedule,
    TraceWorkload,
    Vocabulary,
    Workload,
)
from tandem.client.credentials import Credentials
from tandem.client.registry import credentials_for
from tandem.connectors import without_logins
from tandem.demo import MODEL_DIR

_DEFAULT_RATE = 2.0
_DEFAULT_NUM_REQUESTS = 60
_DEFAULT_NUM_WARM_UP = 4
_API_KEY = "OPENAI_API_KEY"
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)  # RFC 9110, token
_HEADER_VALUE = re.compile(r"[\t -~]*")


class InvalidOption(ValueError):
    """Options that exclude each other or do not fit the served model; the message says what to type."""


@dataclass(slots=True, kw_only=True)
class ServeOptions:
    """The options by their names on the command line; docs/bench_serve.md documents them."""

    address: str | None
    url: str | None
    model: str
    connections: int
    prompt_as: str
    headers: tuple[str, ...]
    extra_body: str | None
    rates: tuple[float, ...]
    """Requests per second; inf: all at once. Empty, with a trace: as recorded."""
    arrivals: str
    burstiness: float | None
    num_requests: int | None
    duration_s: float | None
    max_concurrency: int | None
    timeout_s: float
    warm_up: int | None
    pause_s: float
    seed: int | None
    prompt_len: str
    output_len: str
    prefix_len: int
    num_prefixes: int
    turns: int
    tokenizer: Path | None
    vocab_size: int | None
    trace: Path | None
    trace_from_s: float
    trace_for_s: float | None
    """None: the rest."""
    speed: float
    length_scale: float
    hash_block_len: int
    max_prompt_len: int | None
    max_output_len: int | None
    too_long: TooLong
    goodput: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises InvalidOption. Sets defaults that depend on other options, so that the results file has them."""
        self._check()
        if self.trace is None and not self.rates:
            self.rates = (_DEFAULT_RATE,)
        if self.trace is None and self.num_requests is None and self.duration_s is None:
            self.num_requests = _DEFAULT_NUM_REQUESTS
        if self.warm_up is None:
            self.warm_up = max(_DEFAULT_NUM_WARM_UP, self.num_prefixes if self.prefix_len else 0)
        if self.seed is None:
            self.seed = secrets.randbelow(1 << 31)

    def _check(self) -> None:
        if self.address and self.url:
            raise InvalidOption("--address is a Tandem router, --url an OpenAI endpoint: give only one")
        for flag, number, limit, of_what in (
            ("--warm-up", self.warm_up or 0, MAX_REQUESTS, " requests"),
            ("--num-prefixes", self.num_prefixes, MAX_REQUESTS, ", each is warmed up"),
            ("--prefix-len", self.prefix_len, MAX_LEN, " tokens"),
        ):
            if number > limit:
                raise InvalidOption(f"{flag} {number}: at most {limit}{of_what}")
        if not _is_utf8(self.model):
            raise InvalidOption(f"--model {self.model!r} is not UTF-8")
        if self.burstiness is not None and self.arrivals != "gamma":
            raise InvalidOption(f"--burstiness goes with --arrivals gamma, not with {self.arrivals}")
        if self.prompt_as == "text" and (self.url is None or self.tokenizer is None):
            raise InvalidOption("--prompt-as text requires --url, and --tokenizer FOLDER to decode the ids")
        for name, value in (("--header", self.headers), ("--extra-body", self.extra_body)):
            if value and self.url is None:
                raise InvalidOption(f"{name} goes with --url")
        if self.num_prefixes > 1 and not self.prefix_len:
            raise InvalidOption("--num-prefixes goes with --prefix-len")
        if self.trace is not None and not self.rates and self.arrivals != "poisson":
            raise InvalidOption(
                f"--arrivals {self.arrivals} goes with --rate; without it the arrivals are those of the trace"
            )
        if float("inf") in self.rates and self.duration_s is not None:
            raise InvalidOption("--rate inf sends all at once, so it goes with --num-requests, not with --duration")

    def as_settings(self) -> dict[str, Any]:
        """For the results file, without header values and the login of a URL, which may be secret."""
        named = asdict(self)
        named["url"] = self.url and without_logins(self.url)
        named["rates"] = [str(rate) if rate == float("inf") else rate for rate in self.rates]
        named["headers"] = [header.partition(":")[0] for header in self.headers]
        return named

    def sweep(self) -> Sweep:
        """Raises InvalidOption."""
        assert self.warm_up is not None
        return Sweep(
            self.rates or (None,), self._objectives(), self.max_concurrency, self.timeout_s, self.warm_up, self.pause_s
        )

    def _objectives(self) -> Objectives:
        limits: dict[str, float] = {}
        for part in ",".join(self.goodput).split(",") if self.goodput else ():
            name, _, value = part.strip().partition(":")
            if name not in ("ttft", "tpot", "e2e"):
                raise InvalidOption(f"--goodput {part}: write ttft:MS, tpot:MS or e2e:MS, such as ttft:300")
            try:
                limits[f"{name}_ms"] = float(value)
            except ValueError:
                raise InvalidOption(
                    f"--goodput {part}: {value!r} is not a number of milliseconds, such as 300"
                ) from None
            if not limits[f"{name}_ms"] > 0:
                raise InvalidOption(f"--goodput {part}: the milliseconds must be above 0")
        return Objectives(**limits)


def _is_utf8(text: str) -> bool:
    """A byte of the command line that is not UTF-8 is a lone surrogate here."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def make_endpoint(options: ServeOptions, credentials: Credentials | None) -> Endpoint:
    """The endpoint of --url or --address, or the running local stack. Must be called on the loop that uses it.

    `credentials` None: for a router, those of the local stack that has its address, or else plaintext; for --url, the
    CAs that this machine trusts. Raises InvalidOption, and NotRunning if there is no stack.
    """
    if options.url is None:
        return _grpc_endpoint(options, credentials)
    from tandem.bench.serve.openai_endpoint import OpenAIEndpoint

    try:
        return OpenAIEndpoint(
            options.url,
            model=options.model,
            to_text=_to_text(options.tokenizer) if options.prompt_as == "text" and options.tokenizer else None,
            headers=_headers(options.headers),
            extra_body=_extra_body(options.extra_body),
            tls=_tls(credentials) if credentials is not None else None,
        )
    except InvalidOption:
        raise
    except ValueError as error:
        raise InvalidOption(f"--url {error}") from None


def _tls(credentials: Credentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca_file)
        if credentials.cert_file is not None:
            context.load_cert_chain(credentials.cert_file, credentials.key_file)
    except OSError as error:  # ssl.SSLError too
        raise InvalidOption(f"--ca-file, --cert-file and --key-file: {error}") from None
    return context


def _grpc_endpoint(options: ServeOptions, credentials: Credentials | None) -> Endpoint:
    from tandem.bench.serve.grpc_endpoint import GrpcEndpoint
    from tandem.client.registry import running_address

    address = options.address or running_address()
    try:
        return GrpcEndpoint(
            address,
            num_connections=options.connections,
            model=options.model,
            credentials=credentials_for(address) if credentials is None else credentials,
        )
    except ValueError as error:
        raise InvalidOption(str(error)) from None


def _headers(given: Sequence[str]) -> dict[str, str]:
    """The last one of each name, whatever its case; OPENAI_API_KEY's comes first."""
    key = os.environ.get(_API_KEY, "").strip()
    _check_header_value(_API_KEY, key)
    headers = {"authorization": ("Authorization", f"Bearer {key}")} if key else {}
    for header in given:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise InvalidOption(f"--header {header!r}: write 'Name: value'")
        name, value = name.strip(), value.strip()
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidOption(f"--header {name!r}: a name has letters, digits and hyphens; write 'Name: value'")
        _check_header_value(f"the value of --header {name}", value)
        headers[name.lower()] = (name, value)
    return dict(headers.values())


def _check_header_value(source: str, value: str) -> None:
    """Raises InvalidOption, without the value, which may be secret."""
    if not _HEADER_VALUE.fullmatch(value):
        raise InvalidOption(f"{source} must be printable ASCII, without line breaks")


def _extra_body(text: str | None) -> Mapping[str, Any]:
    try:
        body = json.loads(text or "{}", parse_constant=_reject_constant)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # as it is sent: 1e999 and "\\ud800" can be read
    except ValueError as error:
        raise InvalidOption(f"--extra-body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidOption("--extra-body is not JSON: nested too deeply") from None
    if not isinstance(body, dict):
        raise InvalidOption("--extra-body must be a JSON object, such as '{\"top_k\": 5}'")
    for key in ("n", "best_of"):
        if body.get(key) not in (None, 1):
            raise InvalidOption(
                f"--extra-body has {key} {json.dumps(body[key])}: only 1 is allowed, since a request's figures are "
                "those of one choice; for more load raise --rate"
            )
    return body


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _to_text(folder: Path) -> Callable[[Sequence[int]], str]:
    from engine.errors import EngineError
    from engine.text.tokenizer import Tokenizer

    try:
        return Tokenizer.from_folder(folder).decode
    except EngineError as error:
        raise InvalidOption(f"--tokenizer {error}") from None


def make_workload(options: ServeOptions, served: ServedModel) -> Workload:
    """Raises InvalidOption."""
    assert options.seed is not None
    burstiness = {"poisson": 1.0, "gamma": options.burstiness or 1.0, "even": None}[options.arrivals]
    schedule = Schedule(burstiness, options.num_requests, options.duration_s)
    vocabulary = _vocabulary(options, served)
    try:
        if options.trace is not None:
            use = TraceUse(
                begin_s=options.trace_from_s,
                duration_s=math.inf if options.trace_for_s is None else options.trace_for_s,
                speed=options.speed,
                length_scale=options.length_scale,
                hash_block_len=options.hash_block_len,
                max_input_len=options.max_prompt_len,
                max_output_len=options.max_output_len,
                too_long=options.too_long,
            )
            rows = read_trace(options.trace, options.hash_block_len)
            check_lengths(rows, use)
            return TraceWorkload(vocabulary, schedule, options.seed, rows, use)
        return RandomWorkload(
            vocabulary,
            schedule,
            options.seed,
            _lengths("--prompt-len", options.prompt_len),
            _lengths("--output-len", options.output_len),
            options.prefix_len,
            options.num_prefixes,
            options.turns,
        )
    except (ValueError, OSError) as error:
        raise InvalidOption(str(error)) from None


def _lengths(flag: str, text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise InvalidOption(f"{flag} {error}") from None


def _vocabulary(options: ServeOptions, served: ServedModel) -> Vocabulary:
    is_demo = "demo" in (served.model, served.base)
    folder = MODEL_DIR if options.tokenizer is None and is_demo else options.tokenizer
    vocab_size = options.vocab_size or served.vocab_size
    try:
        if folder is not None:
            return Vocabulary.of_tokenizer(folder, vocab_size=vocab_size, end_ids=served.end_ids)
        if vocab_size is not None:
            return Vocabulary.middle(vocab_size, end_ids=served.end_ids)
    except ValueError as error:
        raise InvalidOption(f"{'--tokenizer' if folder else '--vocab-size'} {error}") from None
    raise InvalidOption(
        f"prompts consist of random token ids, and the endpoint does not report the vocabulary of {served.model}: give "
        "--tokenizer FOLDER (with its tokenizer.json) or --vocab-size N"
    )


def check_requests(requests: Sequence[PlannedRequest], served: ServedModel) -> None:
    """Raises InvalidOption without requests, or for a request that is too long for the model."""
    if not requests:
        raise InvalidOption(
            "no request is due within --duration or the slice of the trace: extend it, or raise --rate; or --too-long "
            "skip leaves none: raise --max-prompt-len or --max-output-len"
        )
    longest = max(requests, key=lambda one: len(one.prompt_token_ids) + one.max_tokens)
    num_prompt, num_output = len(longest.prompt_token_ids), longest.max_tokens
    if served.max_model_len is not None and num_prompt + num_output > served.max_model_len:
        raise InvalidOption(
            f"a request has {num_prompt} + {num_output} tokens; the limit of {served.model} is {served.max_model_len}: "
            "lower --prompt-len, --prefix-len, --output-len or --turns; of a trace --max-prompt-len or --max-output-len"
        )
