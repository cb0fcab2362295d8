"""The router as a process: its imports, its ready line and its signals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import grpc.aio
import pytest

from engine.errors import may_pass
from protos.tandem.v1 import generation_pb2_grpc
from router.__main__ import _model, _run
from router.request.validation import ServedModel
from router.settings import RouterSection, RouterSettings
from serving.lifecycle import EXIT_CANNOT_START, EXIT_FAILED
from serving.settings import SettingsError
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_model_folder
from tests.router.process import router_process
from tests.router.rig import request_of


async def test_a_process_announces_itself_serves_and_drains(model_folder: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with FakeInstance("prefill") as prefill, FakeInstance("decode") as decode:
        pools = ("--prefill", prefill.address, "--decode", f"{decode.address},127.0.0.1:1")
        options = ("--ready-file", str(ready), "--disaggregation", "always", "--log-format", "json")
        async with router_process(model_folder, *pools, *options) as router:
            assert router.ready_line.startswith("ready address=127.0.0.1:")
            assert ready.read_text() == router.ready_line
            async with grpc.aio.insecure_channel(router.address) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                for _ in range(200):
                    try:
                        ids = [i async for response in stub.Generate(request_of()) for i in response.tokens.token_ids]
                        break
                    except grpc.aio.AioRpcError:  # the pools are not yet known
                        await asyncio.sleep(0.02)
                assert len(ids) == 12
            errors = await router.end()
    lines = [json.loads(line) for line in errors.splitlines()]
    finished = [line["fields"] for line in lines if line.get("event") == "finished"]
    assert len(finished) == 1
    fields = finished[0]
    assert (fields["num_prompt_tokens"], fields["num_tokens"], fields["disaggregated"]) == (100, 12, True)
    stages = [
        "received",
        "admitted",
        "picked",
        "kv_reserved",
        "prefill_started",
        "first_token",
        "hand_over_started",
        "kv_loaded",
        "decode_started",
        "finished",
    ]
    times = [fields[f"{stage}_ms"] for stage in stages]
    assert times == sorted(times)


def test_a_model_without_a_tokenizer_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    assert _model(RouterSection(model=str(folder))).tokenizer is None
    [warning] = [record.getMessage() for record in caplog.records]
    assert "no tokenizer.json, only tekken.json; transformers writes it: python -c" in warning
    assert "token ids" in warning


@pytest.mark.parametrize("folder", ["nowhere", "empty", "file"])
def test_a_router_without_the_files_of_a_model_does_not_start(folder: str, tmp_path: Path) -> None:
    """None of its instances would have its tokenizer, so none would ever be used."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=rf"the model's folder: \S+/{folder} is not a folder .* --model FOLDER"):
        _model(RouterSection(model=str(tmp_path / folder)))


def test_a_model_of_nothing_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"the model's folder: \(empty\) is not a folder .* --model FOLDER"):
        _model(RouterSection(model=""))


def test_listen_goes_before_host_and_port() -> None:
    def listen(value: str) -> tuple[str, int]:
        server = RouterSettings(router=RouterSection(model="m", listen=value)).effective_server
        return server.host, server.port

    assert listen("0.0.0.0:80") == ("0.0.0.0", 80)
    assert listen("[::1]:0") == ("::1", 0)
    for wrong in ("nothing", ":5", "a:b", "a:70000"):
        with pytest.raises(ValueError, match="must be host:port"):
            listen(wrong)


def test_a_damaged_file_of_the_model_is_an_error_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"the model's folder: generation_config\.json of the checkpoint is not JS"):
        _model(RouterSection(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EMFILE, EXIT_FAILED), (errno.ENOSPC, EXIT_FAILED), (errno.EADDRINUSE, EXIT_CANNOT_START)],
)
def test_a_start_for_which_the_machine_lacks_something_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    async def serve(_: RouterSettings) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("router.__main__.structured_logging.configure", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        _run(RouterSettings(router=RouterSection(model="m")), serve)
    assert ended.value.code == status


def test_a_model_folder_that_cannot_be_read_for_a_moment_is_no_wrong_setting(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(ServedModel, "from_folder", Mock(side_effect=full))
    with pytest.raises(SettingsError, match="Too many open files") as caught:
        _model(RouterSection(model=str(model_folder)))
    assert may_pass(caught.value)
