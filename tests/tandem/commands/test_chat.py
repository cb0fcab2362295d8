"""`tandem chat` against a real router with fake instances: on a terminal, and with its input from a pipe."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tandem import Client
from tandem.cli import main
from tandem.client.completion import Piece
from tandem.commands import chat as module
from tandem.commands.options import AnswerPrinter
from tests.tandem.commands.background import Background
from tests.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Terminal

pytestmark = pytest.mark.usefixtures("no_other_stack")

QUESTION = [{"role": "user", "content": "What is a tandem?"}]


def chat(stack: Background, text: str | bytes, *options: str) -> Result:
    args = ("chat", "--address", stack.address, "--seed", "5", "--max-tokens", "8", *options)
    return CliRunner().invoke(main, args, input=text)


def answer(stack: Background, messages: list[dict[str, str]]) -> str:
    with Client(stack.address) as client:
        return client.generate(messages, seed=5, max_tokens=8).text


def test_each_line_is_a_message_of_one_conversation(stack: Background) -> None:
    first = answer(stack, QUESTION)
    again = [*QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "And\nthen?"}]
    result = chat(stack, "What is a tandem?\n\nAnd\\\nthen?\n")
    assert (result.exit_code, result.stdout) == (0, f"{first}\n{answer(stack, again)}\n")


CHANNELS = "{# <|channel|> #}{% for message in messages %}<turn>{{ message.content }}{% endfor %}<turn>"
THOUGHT = "<|channel|>analysis<|message|>Two threes.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHANNELS, f"{THOUGHT}<|channel|>final<|message|>Six.<|return|>"),
        (CHANNELS.replace("<|channel|>", "</think>"), "<think>\nTwo threes.\n</think>\n\nSix."),
    ],
)
def test_what_the_model_thinks_is_no_part_of_its_answer(tmp_path: Path, template: str, text: str) -> None:
    stack, path = Background(tmp_path, chat_template=template), tmp_path / "chat.json"
    stack.start()
    try:
        stack.write(text)
        result = chat(stack, f"Factors of 6?\n/save {path}\n", "--max-tokens", "99")
        command = ("generate", "--chat", "Factors of 6?", "--address", stack.address, "--max-tokens", "99")
        generated = CliRunner().invoke(main, command)
    finally:
        stack.stop()
    assert (result.stdout, result.stderr) == ("Six.\n", f"Two threes.\nsaved 2 messages to {path}\n")
    assert json.loads(path.read_text())["messages"][1] == {"role": "assistant", "content": "Six."}
    assert (generated.stdout, generated.stderr) == ("Six.\n", "Two threes.\n")


def test_thoughts_that_cannot_be_printed_cost_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def echo(text: str, *, nl: bool, err: bool) -> None:
        if err:
            raise OSError(errno.ENOSPC, "No space left on device")
        print(text, end="\n" if nl else "")

    monkeypatch.setattr(click, "echo", echo)
    printer = AnswerPrinter()
    for piece in (Piece("", (), reasoning="Hm."), Piece("", (), content="Si"), Piece("", (), content="x.")):
        printer.add(piece)
    assert capsys.readouterr().out == "Six."


def test_reset_forgets_and_system_stays(stack: Background) -> None:
    system = {"role": "system", "content": "Be brief."}
    brief = answer(stack, [system, *QUESTION])
    result = chat(stack, "/system Be brief.\nWhat is a tandem?\n/reset\nWhat is a tandem?\n/system\n/exit\nunread\n")
    assert result.stdout == f"{brief}\n{brief}\nBe brief.\n"
    assert chat(stack, "What is a tandem?\n", "--system", "Be brief.").stdout == f"{brief}\n"


def test_stats_say_when_the_tokens_came_and_which_instances_answered(stack: Background) -> None:
    lines = chat(stack, "hi\n/stats\n" + "x" * 200 + "\n/stats\n").stdout.splitlines()
    assert re.fullmatch(r"8 tokens; TTFT \d+ ms, ITL mean [\d.]+ ms, p99 [\d.]+ ms, \d+ tokens/s", lines[1]), lines
    assert re.match(r"prompt: \d+ tokens, \d+ cached, \d+ from another instance", lines[2])
    assert lines[3].startswith("decode decode-0 (")
    assert lines[-1].startswith("prefill prefill-0 → decode decode-0 (")
    shown = chat(stack, "hi\n", "--stats")
    assert "TTFT" in shown.stderr
    assert "TTFT" not in shown.stdout


def test_a_conversation_is_saved_and_replaces_no_file(stack: Background, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = chat(stack, f"What is a tandem?\n/save {path}\n/save {path}\n", "--system", "Be brief.")
    saved = json.loads(path.read_text())
    assert [one["role"] for one in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][2]["content"] == result.stdout.rstrip("\n")
    assert saved["model"] == "fake"
    assert result.exit_code != 0
    assert "exists; give another name" in result.output


def test_an_adapter_answers_the_conversation_and_is_its_model(stack: Background, tmp_path: Path) -> None:
    stack.write("")
    path = tmp_path / "chat.json"
    result = chat(stack, f"What is a tandem?\nAnd then?\n/save {path}\n", "--lora", "poet")
    assert result.exit_code == 0, result.output
    assert stack.adapters() == ["poet", "poet"]
    assert json.loads(path.read_text())["model"] == "poet"


def test_bytes_that_are_no_text_are_saved_as_question_marks(stack: Background, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = chat(stack, f"/save {path}\n", "--system", "caf\udcff")
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["messages"] == [{"role": "system", "content": "caf?"}]


def test_a_full_disk_leaves_no_part_of_a_conversation(
    stack: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = chat(stack, f"What is a tandem?\n/save {tmp_path / 'chat.json'}\n")
    assert "cannot be written: No space left on device; give another name" in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_value_on_a_terminal_does_not_end_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    """As a token file that is gone with the stack to which it belonged."""
    handled: list[str] = []

    class Chat:
        def handle(self, text: str) -> bool:
            handled.append(text)
            if text == "hi":
                raise ValueError("token_file /gone cannot be read")
            return True

    module._talk(Chat(), iter(["hi", "/save chat.json"]))  # type: ignore[arg-type]
    assert handled == ["hi", "/save chat.json"]
    assert capsys.readouterr().err == "Error: token_file /gone cannot be read\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (b"\xff\n", "line 1 of standard input is not UTF-8"),
        ("/stats\n", "type a message first"),
        ("/sats\n", "did you mean /stats?"),
        ("/quux\n", "/help lists the commands"),
        ("/save\n", "/save chat.json"),
        ("/save /nowhere/chat.json\n", "give another name"),
        ("/save ~nowhere/chat.json\n", "~nowhere/chat.json cannot be written: No such file or directory"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(stack: Background, text: str | bytes, hint: str) -> None:
    result = chat(stack, text)
    assert result.exit_code != 0
    assert hint in result.output
    assert "Traceback" not in result.output


def test_a_closed_standard_input_has_no_messages(
    stack: Background, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        main(("chat", "--address", stack.address))
    assert capsys.readouterr().err == "Error: standard input is closed\n"


def test_without_a_router_it_says_how_to_start_one() -> None:
    result = CliRunner().invoke(main, ("chat",), input="hi\n")
    assert result.exit_code != 0
    assert "tandem up" in result.output


def test_the_calculator_runs_what_the_model_calls(stack: Background, tmp_path: Path) -> None:
    """The model answers with a call again and again: once for each expression, then as often as is allowed."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6×7"}}\n</tool_call>'
    path = tmp_path / "chat.json"
    stack.write(f"Hm.{call}")
    try:
        result = chat(stack, f"What is 6×7?\n/tool\n/save {path}\n", "--tool", "calculator", "--max-tokens", "200")
        tags = [json.loads(tag)["format"] for tag in stack.structural_tags() if tag]
    finally:
        stack.write("")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("(calculator: 6×7 = 42)") == 6
    assert result.stdout == "Hm.\n" * 5 + "tool: calculator\n", "the first answer is to be a call and nothing else"
    messages = json.loads(path.read_text())["messages"]
    assert [one["role"] for one in messages] == ["user"] + ["assistant", "tool"] * 6
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
    assert messages[2]["content"] == "42"
    assert len(tags) == 1, "the expression has been computed: the model may go on as it likes"
    assert '"enum": ["6\\u00d77"]' in json.dumps(tags)


def test_without_an_expression_the_model_may_call(stack: Background) -> None:
    result = chat(stack, "What is a tandem?\n/tool off\nWhat is 6×7?\n/tool abacus\n", "--tool", "calculator")
    assert result.exit_code != 0
    assert "/tool: abacus is no tool; allowed: calculator, off" in result.output
    assert "calculator:" not in result.output


def test_ctrl_c_ends_what_is_read_from_a_pipe(stack: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def interrupted(stream: object, answer: object) -> None:
        asked.append(stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_print_stream", interrupted)
    assert chat(stack, "What is a tandem?\nAnd then?\n").exit_code == 130
    assert len(asked) == 1


def test_help_within_lists_every_command(stack: Background) -> None:
    output = chat(stack, "/help\n").stdout
    for name in ("/stats", "/system TEXT", "/tool NAME", "/reset", "/save FILE", "/exit", "Ctrl-C"):
        assert name in output


def test_ctrl_c_stops_the_answer_and_the_conversation_continues(stack: Background, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tandem", "chat", "--address", stack.address, "--seed", "5", "--max-tokens", "900"]
    terminal = Terminal(command, {"XDG_STATE_HOME": str(tmp_path)})
    try:
        terminal.wait_for_prompt(">")
        stack.slow_down(0.05)
        terminal.type("tell me" + ALT_ENTER + "a story" + ENTER)
        terminal.wait_for("é")
        terminal.type(CTRL_C)
        terminal.wait_for("(stopped)")
        stack.slow_down(0)
        for keys, shown in [
            ("/stats" + ENTER, "TTFT"),
            ("unfinished" + CTRL_C, "(Ctrl-D or /exit ends)"),
            ("/sats" + ENTER, "did you mean /stats?"),
            (UP + UP + ENTER, "mean /stats?\n> /stats\n"),  # the command before the last
        ]:
            terminal.wait_for_prompt(">")
            terminal.type(keys)
            terminal.wait_for(shown)
        terminal.wait_for_prompt(">")
        terminal.type(CTRL_D)
        assert terminal.process.wait(60) == 0
    finally:
        terminal.end()
    history = (tmp_path / "tandem/chat_history").read_text()
    assert "+tell me\n+a story\n" in history
    assert (tmp_path / "tandem/chat_history").stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_read_or_grow_ends_with_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = module._session().history
    history.append_string("kept")
    assert list(history.load_history_strings()) == ["kept"]
    (tmp_path / "tandem/chat_history").unlink()
    (tmp_path / "tandem/chat_history").mkdir()  # no file can be written there, also by root
    history.append_string("shown")
    assert history.get_strings() == ["kept", "shown"]
    assert list(history.load_history_strings()) == []


def test_the_p99_of_a_short_answer_is_its_longest_gap() -> None:
    answer = module._Answer(0.0, times=[(0.01 + index * 0.0001, 1) for index in range(30)] + [(0.2, 1)])
    assert "p99 187.1 ms" in answer.report()[0], answer.report()
