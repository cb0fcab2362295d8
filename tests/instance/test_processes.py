"""Two real processes with real cores: a hand-over gives the tokens of an aggregated engine, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from protos.tandem.v1 import common_pb2, decode_pb2, instance_pb2, prefill_pb2
from protos.tandem.v1.decode_pb2_grpc import DecodeServiceStub
from protos.tandem.v1.instance_pb2_grpc import InstanceServiceStub
from protos.tandem.v1.prefill_pb2_grpc import PrefillServiceStub
from serving.channel import open_channel
from tests.channels import PATIENT
from tests.grpc_calls import next_message
from tests.instance.rig import instance_request, refusal
from tests.process_logs import LOGS

PROMPT = [3 + (7 * i * i) % 500 for i in range(70)]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
"""A small model whose lively weights come from a seed: the same in both processes, and nothing to write."""


class Process:
    """One instance's process, from its start to its end."""

    def __init__(self, role: str, folder: Path, *flags: str, connector: str = "shared_storage") -> None:
        self.role = role
        self._ready = folder / f"{role}-{secrets.token_hex(4)}.ready"
        argv = [sys.executable, "-m", f"{role}_service", "--listen", "127.0.0.1:0", "--ready-file", str(self._ready)]
        argv += [
            "--model",
            str(folder / "model"),
            "--load-format",
            "dummy",
            "--dtype",
            "float32",
            "--num-blocks",
            "64",
            "--num-threads",
            "1",
        ]
        argv += ["--kv-connector", connector]
        if connector != "null":
            argv += ["--kv-folder", str(folder / "kv"), "--kv-secret-file", str(folder / "secret")]
        argv += ["--server-drain-accept-s", "0", "--server-drain-grace-s", "5", "--lease-s", "2", *flags]
        self._log = folder / f"{role}-{secrets.token_hex(4)}.log"
        with self._log.open("w") as log:
            self.popen = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while not self._ready.exists():
            assert self.popen.poll() is None, f"{self.role}: {self.popen.returncode}\n{self._log.read_text()}"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        fields = dict(field.split("=") for field in self._ready.read_text().split()[1:])
        self.address, self.instance_id = fields["address"], fields["instance"]

    def end(self) -> int:
        """Waits for its end and returns its exit status."""
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        status = self.popen.wait(20)
        LOGS.read(self._log)
        return status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "secret").write_text(secrets.token_hex(32))
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Process, Process]]:
    processes = Process("prefill", folder, "--max-num-batched-tokens", "32"), Process("decode", folder)
    try:
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.popen.terminate()
        assert [process.end() for process in processes] == [0, 0]


class Pair:
    """What a router does with the two, in the smallest form."""

    def __init__(self, prefill: grpc.aio.Channel, decode: grpc.aio.Channel, address: str) -> None:
        self.prefill, self.decode = PrefillServiceStub(prefill), DecodeServiceStub(decode)
        self.watches = InstanceServiceStub(prefill), InstanceServiceStub(decode)
        self.address = address

    def source(self, transfer_id: str, epoch: str) -> decode_pb2.TransferSource:
        return decode_pb2.TransferSource(
            transfer_id=transfer_id, address=self.address, instance_epoch=epoch, reservation_s=20.0
        )

    async def disaggregated(self, request: common_pb2.InstanceRequest) -> tuple[list[int], decode_pb2.DecodeLoaded]:
        """All ids of a request that is handed over, and how its KV came."""
        transfer_id = f"t-{request.request_id}"
        hand_over = prefill_pb2.HandOver(transfer_id=transfer_id, lease_s=2.0)
        prefill = self.prefill.Prefill(prefill_pb2.PrefillRequest(request=request, hand_over=hand_over))
        epoch = (await next_message(prefill)).accepted.instance_epoch
        decode = self.decode.Decode()
        start = decode_pb2.DecodeStart(request=request, transfer=self.source(transfer_id, epoch))
        await decode.write(decode_pb2.DecodeRequest(start=start))
        first = (await next_message(prefill)).tokens
        assert first.finish.reason == common_pb2.FINISH_REASON_HAND_OVER
        ids = list(first.token_ids)
        await decode.write(decode_pb2.DecodeRequest(seed=decode_pb2.DecodeSeed(token_ids=ids)))
        await decode.done_writing()
        loaded = decode_pb2.DecodeLoaded()
        async for response in decode:
            if response.WhichOneof("event") == "loaded":
                loaded = response.loaded
            elif response.WhichOneof("event") == "tokens":
                assert response.tokens.token_index == len(ids)
                ids += response.tokens.token_ids
        return ids, loaded

    async def aggregated(self, request: common_pb2.InstanceRequest) -> list[int]:
        """The same request, prefilled and decoded at the decode instance."""

        async def only_start() -> Any:
            yield decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=request))

        return [i async for response in self.decode.Decode(only_start()) for i in response.tokens.token_ids]

    async def wait_idle(self) -> None:
        """Until neither instance has a request, a transfer or a block in use."""
        for stub in self.watches:
            watch = stub.WatchLoad(instance_pb2.WatchLoadRequest())
            async with asyncio.timeout(20):
                while True:
                    load = await next_message(watch)
                    busy = load.num_waiting + load.num_running + load.num_loading + load.num_transfers
                    if busy + load.blocks.running + load.blocks.held + load.blocks.quarantined == 0:
                        break
            watch.cancel()


@pytest.fixture
async def stack(pair: tuple[Process, Process]) -> Any:
    prefill, decode = pair
    async with open_channel(prefill.address, PATIENT) as to_prefill, open_channel(decode.address, PATIENT) as to_decode:
        yield Pair(to_prefill, to_decode, prefill.address)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_hand_over_gives_the_tokens_of_the_aggregated_engine(stack: Pair, temperature: float) -> None:
    sampling = {"temperature": temperature, "seed": 11, "max_tokens": 24, "ignore_eos": True}
    salt = f"salt-{temperature}"
    request = instance_request(f"div-{temperature}", prompt_token_ids=PROMPT, sampling=sampling, cache_salt=salt)
    ids, loaded = await stack.disaggregated(request)
    assert (loaded.num_external_tokens, loaded.num_recomputed_blocks) == (len(PROMPT), 0)
    await stack.wait_idle()
    whole = instance_request(f"whole-{temperature}", prompt_token_ids=PROMPT, sampling=sampling)
    reference = await stack.aggregated(whole)
    assert len(set(reference)) > 5, "a model that repeats itself proves nothing"
    assert ids == reference
    # A request that goes on after ids that were emitted elsewhere gives the rest.
    whole.request_id = f"rest-{temperature}"
    whole.emitted_token_ids.extend(reference[:9])
    assert await stack.aggregated(whole) == reference[9:]
    await stack.wait_idle()


async def test_cancelled_calls_leave_nothing_behind(stack: Pair) -> None:
    sampling = {"max_tokens": 150, "ignore_eos": True}
    request = instance_request("gone-1", prompt_token_ids=PROMPT, sampling=sampling, cache_salt="gone")
    hand_over = prefill_pb2.HandOver(transfer_id="t-gone", lease_s=2.0)
    prefill = stack.prefill.Prefill(prefill_pb2.PrefillRequest(request=request, hand_over=hand_over))
    epoch = (await next_message(prefill)).accepted.instance_epoch
    decode = stack.decode.Decode()
    start = decode_pb2.DecodeStart(request=request, transfer=stack.source("t-gone", epoch))
    await decode.write(decode_pb2.DecodeRequest(start=start))
    assert (await next_message(decode)).WhichOneof("event") == "reserved"
    prefill.cancel()
    decode.cancel()
    await stack.wait_idle()


async def test_a_reservation_without_a_seed_ends(stack: Pair) -> None:
    request = instance_request("seedless", prompt_token_ids=PROMPT)
    source = stack.source("t-never", "no such epoch")
    source.reservation_s = 0.3
    decode = stack.decode.Decode()
    await decode.write(decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=request, transfer=source)))
    assert (await refusal(decode)).code() is grpc.StatusCode.ABORTED
    await stack.wait_idle()


def test_the_server_process_has_no_torch(pair: tuple[Process, Process]) -> None:
    for process in pair:
        maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
        assert "libtorch" not in maps


async def test_an_instance_ends_with_its_core(folder: Path) -> None:
    process = Process("decode", folder, connector="null")
    await asyncio.to_thread(process.wait_ready)
    [core] = psutil.Process(process.popen.pid).children()
    async with open_channel(process.address, PATIENT) as channel:
        request = instance_request(prompt_token_ids=[5], sampling={"max_tokens": 1000, "ignore_eos": True})
        call = DecodeServiceStub(channel).Decode()
        await call.write(decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=request)))
        await call.read()
        core.kill()
        assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(process.popen.wait, 10) == 1
    process.end()
