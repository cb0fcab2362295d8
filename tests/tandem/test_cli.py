"""The command line teaches, suggests, and starts fast."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tandem.cli import main
from tandem.commands.options import OutputFile


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, args)
    return result.exit_code, result.output


@pytest.mark.parametrize("command", [(), ("up",), ("generate",), ("chat",), ("doctor",), ("pools",), ("top",)])
def test_help_has_examples(command: tuple[str, ...]) -> None:
    status, output = run(*command, "--help")
    assert status == 0
    assert output.count(f"tandem {command[0] if command else 'up'}") >= 2


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("generat", "hi"), "Did you mean `tandem generate`?"),
        (("quux",), "Available commands: up, generate, chat, doctor"),
        (("pools", "drian", "decode-0"), "Did you mean `tandem pools drain`?"),
        (("bench", "quux"), "Available commands: latency, serve, throughput, transfer"),
        (("completion", "tcsh"), "bash"),
        (("up", "--prefil", "2"), "--prefill"),
        (("up", "--disaggregation", "allways"), "'--disaggregation': 'allways'; allowed: always, auto, never\n"),
        (("up", "--decode", "0"), "'--decode': '0'; allowed: an integer, 1 to 64\n"),
        (("up", "--threads", "8000"), "'--threads': '8000'; allowed: an integer, 1 to 1024\n"),
        (("bench", "latency", "--threads", "8000"), "'--threads': '8000'; allowed: an integer, 1 to 1024\n"),
        (("up", "--decode", "two"), "'--decode': 'two'; allowed: an integer, 1 to 64\n"),
        (("up", "--kv-memory", "0"), "'--kv-memory': '0'; allowed: a number, above 0, at most 1048576\n"),
        (("up", "--kv-memory", "1e300"), "'--kv-memory': '1e300'; allowed: a number, above 0, at most 1048576\n"),
        (("up", "--kv-memory", "inf"), "'--kv-memory': 'inf'; allowed: a number, above 0, at most 1048576\n"),
        (("bench", "latency", "--kv-memory", "1e300"), "'1e300'; allowed: a number, above 0, at most 1048576\n"),
        (("generate", "hi", "--top-p", "0"), "'--top-p': '0'; allowed: a number, above 0, at most 1\n"),
        (("generate", "hi", "--timeout", "nan"), "'--timeout': 'nan' is not finite"),
        (("bench", "serve", "--seed", "-1"), "'--seed': '-1'; allowed: an integer, at least 0\n"),
        (("bench", "serve", "--json", "/nowhere/j"), "'/nowhere/j': there is no folder /nowhere that can be written"),
        (("bench", "serve", "--plots", "/dev/null/p"), "'/dev/null/p': /dev/null is no folder that can be written"),
        (("bench", "serve", "--json", f"{__file__}/j"), f"there is no folder {__file__} that can be written"),
        (("bench", "serve", "--json", "/dev/null/a/j"), "there is no folder /dev/null/a that can be written"),
        (("bench", "serve", "--json", ""), "'': it is empty"),
        (("bench", "serve", "--plots", ""), "'': it is empty"),
        (("bench", "serve", "--json", "j" * 256), "File name too long"),
        (("bench", "serve", "--plots", "p" * 256), "File name too long"),
        (("bench", "latency", "--json", "/nowhere/j"), "there is no folder /nowhere that can be written"),
        (("bench", "transfer", "--json", "/nowhere/j"), "there is no folder /nowhere that can be written"),
        (("up", "--model", "./nowhere"), "Qwen/Qwen3-0.6B"),
        (("up", "--prefill", "0", "--disaggregation", "always"), "needs at least one prefill instance"),
        (("up", "--connector", "carrier-pigeon"), "shared_storage"),
        (
            ("up", "--connector", "redis,nixl", "--kv-url", "redis://127.0.0.1:1/0"),
            "nixl stores nothing: it can only be the first",
        ),
        (("up", "--connector", "redis"), "--kv-url redis://host:port/0"),
        (("up", "--connector", "redis", "--kv-url", "redis://127.0.0.1:1/0"), "no Redis answers"),
        (("up", "--connector", "redis", "--kv-url", "redis+sentinel://127.0.0.1:1,127.0.0.1:2/kv"), "no Redis answers"),
        (("up", "--connector", "redis", "--kv-url", "redis://:pw@127.0.0.1:1/0"), "no login in it"),
        (("up", "--connector", "lmcache", "--kv-url", "redis://127.0.0.1:1/0"), "use --connector redis"),
        (("up", "--host", "192.0.2.1"), "cannot listen on --host 192.0.2.1"),
        (("up", "--host", ""), "--host is empty; allowed: an IPv4 address or a name"),
        (("up", "--host", "::1"), "allowed: an IPv4 address or a name of this machine, such as 127.0.0.1"),
        (("generate", "hi"), "tandem up"),
        (("generate", "hi", "--address", "127.0.0.1:1"), "no router answers at 127.0.0.1:1"),
        (("generate", "hi", "--system", "x"), "--chat"),
        (("generate", "hi", "--json-schema", "missing.json"), "neither a JSON object nor a readable file"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(args: tuple[str, ...], hint: str) -> None:
    status, output = run(*args)
    assert status != 0
    assert hint in output
    assert "Traceback" not in output


def test_a_file_in_a_folder_that_may_not_be_entered_is_one_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(path: str | os.PathLike[str], **how: Any) -> os.stat_result:
        if "nowhere" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **how)

    stat = os.stat
    monkeypatch.setattr(os, "stat", denied)  # root may enter each folder
    status, output = run("bench", "serve", "--json", "/nowhere/j")
    assert (status, "there is no folder /nowhere that can be written" in output) == (2, True), output


@pytest.mark.parametrize(
    ("target", "problem"),
    [("absent/j", "there is no folder {}/absent that can be written"), ("link", "Too many levels of symbolic links")],
)
def test_a_link_to_where_no_file_can_be_made_is_found_before_the_work(
    target: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(target)
    status, output = run("bench", "serve", "--json", str(tmp_path / "link"))
    assert (status, problem.format(tmp_path) in output) == (2, True), output
    status, output = run("bench", "serve", "--plots", str(tmp_path / "link"))
    assert (status, "link is no folder that can be written" in output or problem in output) == (2, True), output


def test_a_link_whose_file_can_be_made_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("j")
    assert OutputFile().convert(str(tmp_path / "link"), None, None) == tmp_path / "link"
    assert OutputFile().convert("j", None, None) == Path("j")


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, output = run("up", "--port", str(port))
    assert status != 0
    assert f"port {port} is taken" in output
    assert "starting" not in output


def test_a_prompt_that_is_not_utf8_is_refused() -> None:
    result = CliRunner().invoke(main, ("generate", "-"), input=b"\xff\xfe")
    assert result.exit_code != 0
    assert "not UTF-8" in result.output


@pytest.mark.parametrize("args", [("--help",), ("completion", "bash"), ("doctor", "--quick")])
def test_a_full_disk_is_named_where_the_output_goes_to_it(args: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "tandem", *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_an_error_of_a_file_is_not_one_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/block")

    monkeypatch.setattr("tandem.cli.importlib.import_module", full)
    with pytest.raises(OSError, match="/tmp/block"):
        main.main(["pools"])


def test_ctrl_c_has_its_exit_status_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.cli.importlib.import_module", interrupted)
    assert run("bench", "serve") == (130, "\nAborted!\n")


def completed(*words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    env = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_TANDEM_COMPLETE": "bash_complete"}
    output = CliRunner().invoke(main, (), prog_name="tandem", env=env).stdout
    return [line.partition(",")[2] for line in output.splitlines()]


def test_a_shell_completes_commands_options_and_values() -> None:
    assert completed("tandem", "ge") == ["generate"]
    assert completed("tandem", "pools", "dr") == ["drain"]
    assert completed("tandem", "chat", "--sys") == ["--system"]
    assert completed("tandem", "completion", "") == ["bash", "zsh", "fish"]


def test_a_completion_fetches_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr("tandem.commands.up.resolve_adapter", fetched.append)
    assert completed("tandem", "up", "--lora-adapter", "sql=owner/name", "--dec") == ["--decode"]
    assert not fetched


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_the_command_as_the_shell_expects(shell: str) -> None:
    status, script = run("completion", shell)
    assert status == 0
    assert f"_TANDEM_COMPLETE={shell}_complete" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_locale_without_a_character_shows_a_question_mark() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "bench", "serve", "--help"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"--rate, --request-rate R[,R?]" in done.stdout


def test_a_command_without_standard_streams_runs() -> None:
    """As of a service that closes them."""
    command = [sys.executable, "-m", "tandem", "bench", "serve", "--help"]
    done = subprocess.run(["bash", "-c", '"$@" >&- 2>&-', "bash", *command])
    assert done.returncode == 0


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tandem", "up", "--help"], capture_output=True, text=True)
    assert done.stdout.startswith("Usage: tandem up"), done.stderr
