"""The options of `tandem bench serve`: what goes wrong is answered with what to type."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tandem.cli import main
from tests.tandem.bench.serve.conftest import Serve
from tests.tandem.bench.serve.fake_servers import FakeOpenAI, FakeTandem

FEW = ("--rate", "inf", "--num-requests", "5", "--prompt-len", "8", "--output-len", "4", "--pause", "0", "--seed", "3")


def refused(*args: str) -> str:
    """What a command line that is wrong is answered."""
    result = CliRunner().invoke(main, ["bench", "serve", *args])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("--rate", "0"), "such as 1,2,4"),
        (("--rate", "1,x"), "such as 1,2,4"),
        (("--rate", "nan"), "such as 1,2,4"),
        (("--address", "h:1", "--url", "http://h"), "give only one"),
        (("--burstiness", "2"), "goes with --arrivals gamma"),
        (("--burstiness", "0"), "'0'; allowed: a number, above 0"),
        (("--max-concurrency", "0"), "'0'; allowed: an integer, at least 1"),
        (("--timeout", "inf"), "'inf' is not finite"),
        (("--duration", "inf"), "'inf' is not finite"),
        (("--rate", "inf", "--duration", "3"), "goes with --num-requests"),
        (("--prompt-as", "text", "--url", "http://h"), "--tokenizer FOLDER"),
        (("--extra-body", "{}"), "--extra-body goes with --url"),
        (("--url", "http://h", "--extra-body", "["), "Error: --extra-body is not JSON"),
        (("--url", "http://h", "--extra-body", "[]"), "must be a JSON object"),
        (("--url", "http://h", "--extra-body", '{"seed": NaN}'), "Error: --extra-body is not JSON: NaN"),
        (("--url", "http://h", "--extra-body", '{"seed": 1e999}'), "Error: --extra-body is not JSON"),
        (("--url", "http://h", "--extra-body", '{"stop": "\\ud800"}'), "Error: --extra-body is not JSON"),
        (("--url", "http://h", "--extra-body", "[" * 100_000), "Error: --extra-body is not JSON: nested too deeply"),
        (("--url", "http://h", "--extra-body", '{"n": 4}'), "--extra-body has n 4: only 1 is allowed"),
        (("--url", "http://h", "--extra-body", '{"best_of": 2}'), "--extra-body has best_of 2: only 1 is allowed"),
        (("--url", "http://h", "--model", "\udcff"), "Error: --model '\\udcff' is not UTF-8"),
        (("--url", "http://h", "--header", "x"), "Error: --header 'x': write 'Name: value'"),
        (("--url", "http://h", "--header", "X-Team: Jürgen"), "Error: the value of --header X-Team must be printable"),
        (("--url", "http://h", "--header", "X Team: a"), "Error: --header 'X Team': a name has letters, digits"),
        (("--url", "h:80"), "write one like http://"),
        (("--goodput", "itl:5"), "ttft:MS, tpot:MS or e2e:MS"),
        (("--goodput", "ttft:soon"), "is not a number of milliseconds"),
        (("--goodput", "ttft:-1"), "must be above 0"),
        (("--save-requests",), "goes with --json FILE"),
        (("--speed", "2"), "go with --trace FILE"),
        (("--speed", "1"), "--speed and other options of a trace go with --trace FILE"),
        (("--speed", "0"), "'0'; allowed: a number, above 0"),
        (("--length-scale", "-1"), "'-1'; allowed: a number, above 0"),
        (("--trace-for", "0"), "'0'; allowed: a number, above 0"),
        (("--trace-from", "-1"), "'-1'; allowed: a number, at least 0"),
        (("--trace-from", "inf"), "'inf' is not finite"),
        (("--max-prompt-len", "0"), "'0'; allowed: an integer, at least 1"),
        (("--max-output-len", "0"), "'0'; allowed: an integer, at least 1"),
        (("--too-long", "skip"), "go with --trace FILE"),
        (("--trace", __file__, "--prompt-len", "2000"), "a trace has lengths and prefixes of its own"),
        (("--trace", __file__, "--prompt-len", "512"), "a trace has lengths and prefixes of its own"),
        (("--trace", __file__, "--prefix-len", "64"), "a trace has lengths and prefixes of its own"),
        (("--trace", __file__, "--rate", "2", "--speed", "2"), "the times of a trace, which --rate replaces"),
        (("--trace", __file__, "--arrivals", "even"), "--arrivals even goes with --rate"),
        (("--hash-block-len", "16"), "go with --trace FILE"),
        (("--trace", __file__, "--turns", "2"), "a trace has lengths and prefixes of its own"),
        (("--turns", "9", "--address", "{there}"), "the limit of fake is 4096: lower --prompt-len"),
        (("--num-prefixes", "8"), "--num-prefixes goes with --prefix-len"),
        (("--url", "https://h", "--ca-file", "absent"), "Error: --ca-file, --cert-file and --key-file: [Errno 2]"),
        (("--url", "https://h", "--ca-file", __file__), "Error: --ca-file, --cert-file and --key-file: "),
        (("--url", "HTTPS://h", "--ca-file", "absent"), "Error: --ca-file, --cert-file and --key-file: [Errno 2]"),
        (("--url", "https://h", "--cert-file", "c", "--key-file", "k"), "for TLS, which requires ca_file"),
        (("--url", "http://h", "--ca-file", "ca.crt"), "--ca-file is for TLS: --url https://…"),
        (("--url", "http://h", "--server-name", "x"), "--server-name is for a Tandem router"),
        (("--url", "http://h", "--connections", "8"), "--connections is for a Tandem router"),
        (("--prompt-len", "9:3", "--address", "{there}"), "a range like 256:1024"),
        (("--output-len", "many", "--address", "{there}"), "Error: --output-len 'many': not a number; write a length"),
        (("--prompt-len", "9" * 20, "--address", "{there}"), "the second must be at most 16777216"),
        (("--output-len", "1:99999999", "--address", "{there}"), "to 99999999: the second must be at most 16777216"),
        (("--prefix-len", "16777217"), "--prefix-len 16777217: at most 16777216 tokens"),
        (("--prompt-len", "5000", "--address", "{there}"), "the limit of fake is 4096"),
        (("--rate", "50,1e300", "--duration", "1", "--address", "{there}"), "more than 1000000 requests at 1e+300/s"),
        (("--rate", "inf", "--num-requests", "1000001", "--address", "{there}"), "more than 1000000 requests at once"),
        (("--warm-up", "1000001"), "--warm-up 1000001: at most 1000000 requests"),
        (("--duration", "0.001", "--rate", "0.001", "--address", "{there}"), "no request is due"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(args: tuple[str, ...], hint: str, serve: Serve) -> None:
    there = serve(FakeTandem()).address if "{there}" in args else ""
    assert hint in " ".join(refused(*(arg.replace("{there}", there) for arg in args)).split())


def test_an_adapter_is_measured_by_its_name(serve: Serve) -> None:
    server = FakeTandem()
    server.lora_adapters = ["poet", "sql"]
    serve(server)
    result = CliRunner().invoke(main, ["bench", "serve", "--address", server.address, *FEW, "--model", "sql"])
    assert (result.exit_code, server.requested) == (0, {"sql"}), result.output
    assert "model sql;" in result.stdout
    unknown = CliRunner().invoke(main, ["bench", "serve", "--address", server.address, "--model", "x"])
    assert "serves fake, poet, sql; omit --model, or give one of these names" in unknown.output


def test_an_adapter_gets_the_prompts_of_its_model(serve: Serve) -> None:
    server = FakeOpenAI()
    server.models = [{"id": "demo"}, {"id": "sql", "parent": "demo"}]
    serve(server)
    prompts = []
    for model in ("demo", "sql"):
        result = CliRunner().invoke(main, ["bench", "serve", "--url", server.url, "--model", model, *FEW])
        assert result.exit_code == 0, result.output
        prompts.append({tuple(prompt) for prompt in server.prompts})
        server.prompts = []
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("body", ['{"n": 1, "best_of": 1}', '{"n": null}'])
def test_a_single_choice_may_be_named(body: str) -> None:
    result = CliRunner().invoke(main, ["bench", "serve", "--url", "http://127.0.0.1:1", "--extra-body", body])
    assert (result.exit_code, "All connection attempts failed" in result.output) == (1, True), result.output


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "-e '.[plots]'" in refused("--plots", "there")


def test_help_teaches() -> None:
    result = CliRunner().invoke(main, ["bench", "serve", "--help"])
    assert result.output.count("tandem bench serve") >= 8
