"""`tandem bench serve` against both kinds of endpoint, with what goes wrong; with Ctrl-C and a router that ends, as a
process."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem.bench.serve.report import Results
from tandem.cli import main
from tandem.client import registry
from tandem.client.registry import RunningStack, StackFolder
from tandem.commands.bench.serve import _stop_on_signals
from tandem.demo import MODEL_DIR
from tandem.local_stack.pki import StackCa
from tests.certificates import files_of
from tests.tandem.bench.serve.conftest import Serve
from tests.tandem.bench.serve.fake_servers import Behaviour, FakeOpenAI, FakeTandem
from tests.waiting import until

SMALL = ("--prompt-len", "8", "--output-len", "4", "--pause", "0")
GUARD_S = 60.0
SIGNALS = [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
FEW_SIGNALS = [SIGNALS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SIGNALS[1:])]
"""Where the load itself plays no part in it: each signal ends a load in
`test_ctrl_c_ends_it_at_once_and_keeps_what_was_measured`."""


def arguments(*args: str) -> tuple[str, ...]:
    return ("bench", "serve", *(() if "--trace" in args else SMALL), *args)  # a trace has lengths of its own


async def started(
    *args: str, stdout: int = asyncio.subprocess.PIPE, stderr: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem.cli", *arguments(*args)), stdout=stdout, stderr=stderr
    )


def bench(*args: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error, in this process."""
    result = CliRunner().invoke(main, arguments(*args), env=environment)
    return result.exit_code, result.stdout, result.stderr


async def test_a_sweep_over_grpc_is_on_the_screen_and_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    async with FakeTandem(Behaviour(first_s=0.02, gap_s=0.01)) as server, asyncio.timeout(GUARD_S):
        process = await started(
            "--address", server.address, "--rate", "20,inf", "--num-requests", "5", "--seed", "3",
            "--goodput", "ttft:60000,e2e:60000", "--json", str(file), "--save-requests", "--plots", str(tmp_path / "p"),
        )  # fmt: skip
        output, errors = [text.decode() for text in await process.communicate()]
    assert process.returncode == 0, errors
    assert server.num_requests == 2 * (4 + 5)  # warm-up and run, twice
    assert {len(prompt) for prompt in server.prompts} == {8}
    assert len(set(server.prompts)) == 18
    for part in (
        "20/s",
        "all at once",
        "seed 3",
        "5 ok, 0 failed, 0 refused",
        "GOODPUT",
        "100.0% met",
        "by the token ids",
    ):
        assert part in output
    assert "20/s: 5 requests" in errors
    results = json.loads(file.read_text())
    assert [point["num_succeeded"] for point in results["points"]] == [5, 5]
    assert [len(one["token_s"]) for point in results["points"] for one in point["requests"]] == [4] * 10
    assert results["settings"]["rates"] == [20, "inf"]
    assert not results["partial"]
    plots = {path.name for path in (tmp_path / "p").iterdir()}
    assert plots == {"latency_cdfs.png", "itl_over_time.png", "latency_over_rate.png", "goodput_over_rate.png"}


def test_an_openai_endpoint_is_measured_with_prompts_of_ordinary_tokens(serve: Serve) -> None:
    server = serve(FakeOpenAI())
    status, output, errors = bench(
        "--url", server.url, "--tokenizer", str(MODEL_DIR), "--rate", "inf", "--num-requests", "5"
    )
    assert status == 0, errors
    assert "5 ok" in output
    assert "the endpoint's usage agrees" in output
    assert server.num_requests == 9


def test_an_https_endpoint_is_measured_with_its_ca_alone(tmp_path: Path, serve: Serve) -> None:
    files, server = files_of(tmp_path, "server", StackCa()), FakeOpenAI()
    server.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.tls.load_cert_chain(files.certificate, files.key)
    options = ("--url", serve(server).url, "--rate", "inf", "--num-requests", "2", "--vocab-size", "100")
    status, _, errors = bench(*options)
    assert status == 1
    assert "--ca-file FILE: the CA that issued its certificate" in errors
    status, output, errors = bench(*options, "--ca-file", str(files.ca), TANDEM_CLIENT__CERT_FILE="a router's")
    assert status == 0, errors
    assert "2 ok, 0 failed" in output


def test_the_key_of_an_endpoint_is_sent_and_never_written(serve: Serve, tmp_path: Path) -> None:
    server = serve(FakeOpenAI())
    status, output, errors = bench(
        "--url", server.url, "--vocab-size", "500", "--rate", "inf", "--num-requests", "1",
        "--header", "X-Secret: hidden", "--json", str(tmp_path / "j"), OPENAI_API_KEY="hidden",
    )  # fmt: skip
    assert status == 0, errors
    assert server.headers["authorization"] == "Bearer hidden"
    assert server.headers["x-secret"] == "hidden"
    assert "hidden" not in output + errors + (tmp_path / "j").read_text()


def test_a_key_with_a_line_break_is_stripped_or_refused_and_never_shown(serve: Serve) -> None:
    server = serve(FakeOpenAI())
    options = ("--url", server.url, "--vocab-size", "500", "--rate", "inf", "--num-requests", "1")
    status, output, errors = bench(*options, OPENAI_API_KEY="hidden\n")
    assert status == 0, errors
    assert server.headers["authorization"] == "Bearer hidden"
    status, output, errors = bench(*options, OPENAI_API_KEY="hidden\nhidden")
    assert (status, "OPENAI_API_KEY must be printable ASCII" in errors) == (2, True), errors
    assert "hidden" not in output + errors


@pytest.mark.parametrize("login", ["user:hidden", "user:hid@hidden"])
def test_the_login_in_a_url_is_sent_and_never_written(login: str, serve: Serve, tmp_path: Path) -> None:
    server = serve(FakeOpenAI())
    url, file = server.url.replace("://", f"://{login}@"), tmp_path / "j"
    options = ("--vocab-size", "500", "--rate", "inf", "--num-requests", "1", "--json", str(file))
    status, output, errors = bench("--url", url, *options)
    assert status == 0, errors
    assert server.headers["authorization"].startswith("Basic ")
    assert json.loads(file.read_text())["settings"]["url"] == server.url.replace("://", "://***@")
    assert "hidden" not in output + errors + file.read_text()
    for wrong in (f"http://{login}@127.0.0.1:1", f"http://{login}@h:port", f"ftp://{login}@h", f"{url}/absent"):
        status, output, errors = bench("--url", wrong, *options)
        assert (status > 0, "***@" in errors, "hidden" in output + errors) == (True, True, False), errors


def test_a_header_replaces_the_one_of_the_same_name_in_any_case(serve: Serve) -> None:
    server = serve(FakeOpenAI())
    status, _, errors = bench(
        "--url", server.url, "--vocab-size", "500", "--rate", "inf", "--num-requests", "1",
        "--header", "authorization: Basic mine", "--header", "X-Of: 1", "--header", "x-of: 2", OPENAI_API_KEY="key",
    )  # fmt: skip
    assert status == 0, errors
    assert server.headers["authorization"] == "Basic mine"
    assert server.headers["x-of"] == "2"


def test_a_token_is_sent_to_the_router(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-a-tenant\n")
    server = serve(FakeTandem())
    status, _, errors = bench(
        "--address", server.address, "--rate", "inf", "--num-requests", "1", "--token-file", str(tmp_path / "token")
    )
    assert status == 0, errors
    assert server.headers["authorization"] == "Bearer of-a-tenant"
    status, _, errors = bench("--address", server.address, "--token-file", str(tmp_path / "none"))
    assert status == 1
    assert "token_file: " in errors
    assert server.num_requests == 5


def test_the_stack_that_runs_here_is_found(serve: Serve, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    folder = StackFolder()
    try:
        server = serve(FakeTandem())
        registry.announce(RunningStack(server.address, str(folder.path), os.getpid(), "fake", {}, 1.0))
        status, output, errors = bench("--rate", "inf", "--num-requests", "2")
    finally:
        folder.remove()
    assert status == 0, errors
    assert f"Tandem at {server.address}" in output


def test_without_a_stack_it_gives_the_command(short_folder: Path) -> None:
    status, _, errors = bench(XDG_RUNTIME_DIR=str(short_folder))
    assert status == 1
    assert "tandem up" in errors
    assert "--address host:port" in errors


def mixed(number: int) -> Behaviour:
    """After the warm-up: one that fails, one that is refused, one that hangs up, and good ones."""
    kinds = {4: Behaviour(fail_at=2), 5: Behaviour(refuse=True), 6: Behaviour(hang_up_at=1)}
    return kinds.get(number, Behaviour())


def test_failures_and_refusals_are_counted_by_reason_and_none_is_lost(serve: Serve) -> None:
    server = serve(FakeTandem(mixed))
    status, output, errors = bench("--address", server.address, "--rate", "inf", "--num-requests", "6")
    assert status == 0, errors
    assert "3 ok, 2 failed, 1 refused" in output
    for reason in ("1 x INTERNAL, such as: ", "1 x RESOURCE_EXHAUSTED, such as: the house is full", "1 x DATA_LOSS"):
        assert reason in output


def test_when_nothing_answers_the_warm_up_no_load_is_sent(serve: Serve) -> None:
    server = serve(FakeTandem(Behaviour(refuse=True)))
    status, _, errors = bench("--address", server.address)
    assert status == 1
    assert "none of the 4 requests of the warm-up succeeded: RESOURCE_EXHAUSTED: the house is full\n" in errors
    assert server.num_requests == 4


def test_another_model_is_refused_once_and_before_any_request(serve: Serve) -> None:
    server = serve(FakeTandem())
    status, _, errors = bench("--address", server.address, "--model", "x")
    assert (status, server.num_requests) == (1, 0)
    refusal = f"Error: --model x: Tandem at {server.address} (gRPC) serves fake; omit --model, or give this name"
    assert errors.strip().splitlines() == [refusal]


async def test_a_router_that_stops_is_counted_and_grpc_itself_prints_nothing() -> None:
    async with FakeTandem(lambda number: Behaviour(hang_at=1 if number >= 4 else None)) as server:
        process = await started("--address", server.address, "--rate", "inf", "--num-requests", "2")
        await until(lambda: server.num_requests == 4 + 2, within_s=GUARD_S)
    output, errors = await process.communicate()
    assert b"2 x UNAVAILABLE" in output, output
    assert errors.decode().splitlines()[2:] == [], errors


def test_an_endpoint_that_stops_between_two_rates_leaves_the_figures_of_the_first(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "j"
    server = serve(FakeTandem(lambda number: Behaviour(refuse=number >= 4 + 3)))
    status, output, _ = bench(
        "--address", server.address, "--rate", "inf,9", "--num-requests", "3", "--json", str(file)
    )
    assert status == 1
    assert "3 ok, 0 failed, 0 refused" in output
    assert "PARTIAL, stopped: none of the 4 requests of the warm-up succeeded" in output
    assert [point["num_succeeded"] for point in json.loads(file.read_text())["points"]] == [3]


def test_when_everything_fails_so_does_the_command(serve: Serve) -> None:
    server = serve(FakeTandem(lambda number: Behaviour(refuse=number >= 4)))
    status, output, _ = bench("--address", server.address, "--rate", "inf", "--num-requests", "3")
    assert status == 1
    assert "0 ok, 0 failed, 3 refused" in output


@pytest.mark.parametrize(("number", "name"), SIGNALS)
async def test_ctrl_c_ends_it_at_once_and_keeps_what_was_measured(tmp_path: Path, number: int, name: str) -> None:
    def half_hang(index: int) -> Behaviour:
        return Behaviour(hang_at=2 if index >= 4 and index % 2 else None)

    file = tmp_path / "j"
    async with FakeTandem(half_hang) as server, asyncio.timeout(GUARD_S):
        # STEP six requests are sent; three of them never end, and a second rate would follow
        process = await started(
            "--address", server.address, "--rate", "inf,5", "--num-requests", "6", "--json", str(file)
        )
        while not (server.num_requests == 10 and server.in_flight == 3):
            assert process.returncode is None
            await asyncio.sleep(0.02)
        # STEP Ctrl-C
        process.send_signal(number)
        output, errors = await process.communicate()
        # STEP the server's calls are gone, the figures are there and say that they are partial
        while server.in_flight:
            await asyncio.sleep(0.02)
    assert process.returncode == 130, errors
    counts = re.search(r"(\d) ok, 0 failed, 0 refused, (\d) unfinished", output.decode())
    assert counts is not None, output.decode()
    num_ok, num_unfinished = map(int, counts.groups())  # an answer that the server has ended may be on its way
    assert num_ok + num_unfinished == 6
    assert num_unfinished >= 3
    assert f"PARTIAL, stopped: {name}; figures until then" in output.decode()
    results = json.loads(file.read_text())
    assert (results["partial"], results["stopped_by"]) == (True, name)
    assert len(results["points"]) == 1
    assert server.num_requests == 10


async def fifth_answered(server: FakeTandem, process: asyncio.subprocess.Process) -> None:
    """With --max-concurrency 1: the sixth request shows that the client has read the answer of the fifth."""
    while server.num_requests < 6:
        assert process.returncode is None
        await asyncio.sleep(0.02)


def fifth_succeeds(index: int) -> Behaviour:
    """The first four warm up; those after the fifth never end."""
    return Behaviour(hang_at=2 if index > 4 else None)


async def test_a_terminal_that_is_closed_ends_it_and_the_file_has_what_was_measured(tmp_path: Path) -> None:
    file, (terminal, its_end) = tmp_path / "j", pty.openpty()
    async with FakeTandem(fifth_succeeds) as server, asyncio.timeout(GUARD_S):
        process = await asyncio.create_subprocess_exec(
            *("setsid", "--ctty", sys.executable, "-m", "tandem.cli"),
            *arguments("--address", server.address, "--max-concurrency", "1", "--json", str(file)),
            stdin=its_end, stdout=its_end, stderr=its_end,
        )  # fmt: skip
        os.close(its_end)
        await fifth_answered(server, process)
        os.close(terminal)
        assert await process.wait() == 130
    results = json.loads(file.read_text())
    assert (results["stopped_by"], results["points"][0]["num_succeeded"]) == ("SIGHUP", 1)


@pytest.mark.parametrize(
    ("opened", "number", "name"),
    [
        (os.pipe, *SIGNALS[0]),
        pytest.param(pty.openpty, *SIGNALS[1], marks=pytest.mark.slow),
        *(pytest.param(os.pipe, *each, marks=pytest.mark.slow) for each in SIGNALS[1:]),
    ],
)
async def test_the_file_has_what_was_measured_where_nothing_can_be_printed(
    opened: Callable[[], tuple[int, int]], number: int, name: str, tmp_path: Path
) -> None:
    """The reader of the pipe has ended, as `tee` does by the same Ctrl-C, or the terminal is gone."""
    file, (reader, its_end) = tmp_path / "j", opened()
    async with FakeTandem(fifth_succeeds) as server, asyncio.timeout(GUARD_S):
        process = await started(
            "--address", server.address, "--max-concurrency", "1", "--json", str(file), "--plots", str(tmp_path / "p"),
            stdout=its_end, stderr=its_end,
        )  # fmt: skip
        os.close(its_end)
        await fifth_answered(server, process)
        os.close(reader)
        process.send_signal(number)
        assert await process.wait() == 130
    results = json.loads(file.read_text())
    assert (results["stopped_by"], results["points"][0]["num_succeeded"]) == (name, 1)
    assert any((tmp_path / "p").iterdir())


@pytest.mark.parametrize(("rates", "is_partial"), [("inf,9", True), ("inf", False)])
async def test_a_load_whose_figures_cannot_be_printed_ends_and_keeps_those_measured(
    rates: str, is_partial: bool, tmp_path: Path
) -> None:
    file, (reader, its_end) = tmp_path / "j", os.pipe()
    async with FakeTandem(closes(reader)) as server, asyncio.timeout(GUARD_S):
        process = await started("--address", server.address, "--rate", rates, "--json", str(file), stdout=its_end)
        os.close(its_end)
        _, errors = await process.communicate()
    assert process.returncode == 1, errors
    problem = "standard output cannot be written: Broken pipe"
    assert errors.decode().splitlines()[2:] == [f"Error: {problem}"]
    results = json.loads(file.read_text())
    assert (results["partial"], results["stopped_by"]) == (is_partial, problem if is_partial else "")
    assert [point["num_succeeded"] for point in results["points"]] == [60]


async def test_a_load_whose_progress_cannot_be_printed_goes_on() -> None:
    reader, its_end = os.pipe()
    async with FakeTandem(closes(reader)) as server, asyncio.timeout(GUARD_S):
        process = await started("--address", server.address, "--rate", "inf,inf", stderr=its_end)
        os.close(its_end)
        output, _ = await process.communicate()
    assert process.returncode == 0, output
    assert output.count(b"60 ok") == 2


def closes(reader: int) -> Callable[[int], Behaviour]:
    """Closes that end of a pipe when the first request after the warm-up comes."""

    def behaviour(index: int) -> Behaviour:
        if index == 4:
            os.close(reader)
        return Behaviour()

    return behaviour


def test_a_hangup_that_is_ignored_stays_ignored(ignored_hangup: signal.Handlers) -> None:
    async def handler() -> object:
        _stop_on_signals(Results("endpoint", "model", {}))
        return signal.getsignal(signal.SIGHUP)

    assert asyncio.run(handler()) is ignored_hangup


def earlier_files(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A file of figures, and the options by which another run would replace it."""
    file = folder / "j"
    file.write_text("earlier")
    return file, ("--json", str(file), "--plots", str(folder / "plots"))


async def test_ctrl_c_in_the_warm_up_reports_that_nothing_was_measured_and_replaces_no_file(tmp_path: Path) -> None:
    file, options = earlier_files(tmp_path)
    async with FakeTandem(Behaviour(hang_at=0)) as server, asyncio.timeout(GUARD_S):
        process = await started("--address", server.address, *options)
        while server.in_flight < 4:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
    assert process.returncode == 130, errors
    assert "PARTIAL, stopped: Ctrl-C; nothing was measured" in output.decode()
    assert file.read_text() == "earlier"
    assert not (tmp_path / "plots").exists()


async def test_ctrl_c_before_the_first_request_replaces_no_file(tmp_path: Path) -> None:
    file, options = earlier_files(tmp_path)
    async with FakeTandem() as server, asyncio.timeout(GUARD_S):
        process = await started(
            "--address", server.address, "--rate", "0.001", "--num-requests", "1", "--warm-up", "0", *options
        )
        assert process.stderr is not None
        while b"1 requests" not in await process.stderr.readline():
            assert process.returncode is None
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
    assert process.returncode == 130, errors
    assert "nothing was measured" in output.decode()
    assert (server.num_requests, file.read_text()) == (0, "earlier")


@pytest.mark.parametrize(("number", "name"), FEW_SIGNALS)
async def test_a_signal_ends_the_planning_of_a_long_load(number: int, name: str, tmp_path: Path) -> None:
    file, options = earlier_files(tmp_path)
    async with FakeTandem() as server, asyncio.timeout(GUARD_S):
        process = await started(
            "--address", server.address, "--rate", "inf", "--num-requests", "1000000", "--prompt-len", "1000", *options
        )
        assert process.stdout is not None
        assert b"seed" in await process.stdout.readline()
        process.send_signal(number)
        output, errors = await process.communicate()
    assert process.returncode == 130, errors
    assert f"PARTIAL, stopped: {name}; nothing was measured" in output.decode()
    assert (server.num_requests, file.read_text()) == (0, "earlier")


def test_the_limit_on_concurrency_reaches_the_load(serve: Serve) -> None:
    server = serve(FakeTandem(Behaviour(first_s=0.02)))
    status, output, errors = bench(
        "--address",
        server.address,
        "--rate",
        "inf",
        "--num-requests",
        "12",
        "--max-concurrency",
        "2",
        "--warm-up",
        "1",
    )
    assert status == 0, errors
    assert server.max_in_flight == 2
    assert "delayed by the concurrency limit: 10 of 12 requests" in output


def test_a_trace_is_replayed(serve: Serve, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = ("2023-11-16 18:00:00,30,2", "2023-11-16 18:00:01,40,3", "2023-11-16 18:00:02,5000,3")
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    replay = ("--trace", str(trace), "--speed", "20", "--warm-up", "0")
    server = serve(FakeTandem())
    status, _, errors = bench("--address", server.address, *replay)
    assert (status, server.num_requests) == (2, 0)
    assert "5000 + 3 tokens" in errors
    status, _, errors = bench("--address", server.address, *replay, "--length-scale", "1e6")
    assert (status, server.num_requests) == (2, 0)
    assert "Error: --length-scale 1e+06 makes more than 16777216 tokens" in errors
    status, _, errors = bench("--address", server.address, *replay, "--max-prompt-len", "5", "--too-long", "skip")
    assert (status, server.num_requests) == (2, 0)
    assert "skip leaves none: raise --max-prompt-len" in errors
    status, output, errors = bench("--address", server.address, *replay, "--max-prompt-len", "50", "--too-long", "skip")
    assert status == 0, errors
    assert "2 of 3 rows, 1 skipped as too long" in output
    assert sorted(len(prompt) for prompt in server.prompts) == [30, 40], "50 ms apart: a busy machine swaps them"


def test_a_later_rate_without_requests_is_found_before_anything_is_sent(serve: Serve) -> None:
    server = serve(FakeTandem())
    status, _, errors = bench("--address", server.address, "--rate", "50,0.001", "--duration", "0.2")
    assert (status, server.num_requests) == (2, 0)
    assert "no request is due" in errors


def test_an_unknown_vocabulary_must_be_given(serve: Serve) -> None:
    server = serve(FakeOpenAI())
    status, _, errors = bench("--url", server.url)
    assert status == 2
    assert "--tokenizer FOLDER" in errors
    assert "--vocab-size N" in errors
