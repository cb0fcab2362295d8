"""`tandem generate`: mistakes in its options, and the times that it prints."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tandem.cli import main
from tandem.commands import generate as module
from tests.tandem.commands.background import Background


def generate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ("generate", "Once", *arguments))
    return result.exit_code, result.output


def test_a_request_that_is_late_names_the_option(stack: Background) -> None:
    status, output = generate("--address", stack.address, "--timeout", "1e-6")
    assert status == 1
    assert output.startswith("Error: "), "nothing precedes it"
    assert output.strip().endswith("(--timeout 1e-06: seconds for the whole request)")


@pytest.mark.parametrize("option", ["--json-schema", "--token-file"])
def test_a_missing_file_is_named_once(stack: Background, option: str) -> None:
    status, output = generate("--address", stack.address, option, "none.json")
    assert status > 0
    assert output.rstrip().endswith(": No such file or directory")


def test_an_adapter_is_asked_for(stack: Background) -> None:
    stack.write("")
    assert generate("--address", stack.address, "--max-tokens", "2", "--lora", "poet")[0] == 0
    assert stack.adapters() == ["poet"]
    status, output = generate("--address", stack.address, "--lora", "clerk")
    assert status == 1
    assert "lora: adapter 'clerk' is not served; served: 'poet'" in output


def test_the_times_are_without_the_listing_of_log_probabilities(
    stack: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [1.0]

    def read_tokenizer(address: str) -> None:
        clock_s[0] += 100.0

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    monkeypatch.setattr(module, "_texts_of_ids", read_tokenizer)
    _, output = generate("--address", stack.address, "--max-tokens", "8", "--logprobs", "0", "--stats")
    assert output.rstrip().endswith("8 tokens; first after 0 ms, then one every 0.0 ms")


def test_a_single_token_has_no_time_between_tokens(stack: Background) -> None:
    _, output = generate("--address", stack.address, "--max-tokens", "1", "--stats")
    assert re.search(r"\n1 token; first after \d+ ms\n$", output)


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_answer_does_not_command_the_terminal(
    stack: Background, monkeypatch: pytest.MonkeyPatch, command: str, is_terminal: bool
) -> None:
    monkeypatch.setattr("tandem.commands.options.is_terminal", lambda stream: is_terminal)
    stack.write("a\tb\nc\x07\x9b2J\x1b]0;title\x07é")
    try:
        arguments = (command, *(["Once"] if command == "generate" else []), "--address", stack.address)
        output = CliRunner().invoke(main, (*arguments, "--max-tokens", "60"), input="Once\n", color=True).stdout
    finally:
        stack.write("")
    shown = "c\\x07\\x9b2J\\x1b]0;title\\x07é" if is_terminal else "c\x07\x9b2J\x1b]0;title\x07é"
    assert output.startswith(f"a\tb\n{shown}"), ascii(output)


def test_a_closed_standard_input_has_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        main(("generate", "-", "--address", "127.0.0.1:1"))
    assert capsys.readouterr().err == "Error: standard input is closed\n"


def test_no_time_at_all_is_a_mistake() -> None:
    status, output = generate("--timeout", "0")
    assert status == 2
    assert "'0'; allowed: a number, above 0" in output
