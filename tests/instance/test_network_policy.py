"""Which callers an instance admits, and which of the addresses named by callers it dials."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from decode_service.service import ROLE as DECODE
from instance.settings import InstanceSettings, ListenSettings, ModelSection
from instance.transfers import PeerChannels
from prefill_service.service import ROLE as PREFILL
from protos.tandem.v1 import decode_pb2, instance_pb2, instance_pb2_grpc
from serving.channel import open_channel
from serving.errors import PermissionDenied, Unavailable
from serving.settings import SettingsError
from serving.tls import TlsFiles, TlsSettings
from tandem.local_stack.pki import StackCa
from tests.certificates import files_of
from tests.channels import PATIENT
from tests.instance.rig import instance_request, refusal, running

TIMEOUT_S = 20.0
NOT_PRIVATE = ("8.8.8.8:443", "169.254.169.254:80", "[fe80::1]:80", "0.0.0.0:7000", "[2001:db8::1]:7000")


def start(address: str, **fields: Any) -> decode_pb2.DecodeRequest:
    source = decode_pb2.TransferSource(transfer_id="t1", address=address, instance_epoch="e", **fields)
    return decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=instance_request(), transfer=source))


@pytest.mark.parametrize("address", NOT_PRIVATE)
async def test_without_tls_an_address_outside_private_networks_is_refused_and_not_dialled(
    tmp_path: Path, address: str
) -> None:
    async with running(tmp_path, DECODE) as rig:
        call = rig.decode.Decode(timeout=TIMEOUT_S)
        await call.write(start(address))
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert f"transfer.address: {address} is not in a private network" in str(error.details())
        assert not rig.server.peers._by_target


async def test_a_name_is_dialled_where_it_stood_for_when_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    answers = {"inside": "10.0.0.9", "outside": "169.254.169.254"}

    async def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in answers:
            raise OSError(-2, "Name or service not known")
        return [(0, 0, 0, "", (answers[host], 0))]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    peers = PeerChannels(PATIENT)
    try:
        async with peers.channel("inside:7000") as by_name, peers.channel("10.0.0.9:7000") as by_address:
            assert by_name is by_address
        with pytest.raises(PermissionDenied, match=r"169\.254\.169\.254:7000"):
            async with peers.channel("outside:7000"):
                pass
        with pytest.raises(Unavailable, match="unknown cannot be resolved"):
            async with peers.channel("unknown:7000"):
                pass
    finally:
        await peers.close()


@pytest.mark.parametrize("address", ["prefill..svc:7000", f"{'x' * 64}:7000"])
async def test_a_name_that_cannot_be_is_unavailable(address: str) -> None:
    peers = PeerChannels(PATIENT)
    with pytest.raises(Unavailable, match="cannot be resolved"):
        async with peers.channel(address):
            pass


async def test_a_host_called_unix_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = grpc.aio.server()
    server.add_insecure_port("unix:80")
    await server.start()
    peers = PeerChannels(PATIENT, allow_public=True)
    try:
        async with peers.channel("unix:80") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await instance_pb2_grpc.InstanceServiceStub(channel).Drain(instance_pb2.DrainRequest(), timeout=2.0)
        assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    finally:
        await peers.close()
        await server.stop(None)


def test_allow_plaintext_and_tls_lift_the_restriction(tmp_path: Path) -> None:
    tls = files_of(tmp_path, "instance", StackCa()).tls()
    for peers in (PeerChannels(PATIENT, allow_public=True), PeerChannels(PATIENT, tls=tls)):
        for address in NOT_PRIVATE:
            peers.check_address(address)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "169.254.1.1"])
def test_without_tls_an_instance_listens_on_private_addresses_alone(host: str, tmp_path: Path) -> None:
    model = ModelSection(folder=tmp_path)
    settings = InstanceSettings(model=model, server=ListenSettings(host=host))
    with pytest.raises(SettingsError, match=r"server\.host: .* without TLS an instance listens on private addresses"):
        settings.check_network()
    InstanceSettings(model=model, server=ListenSettings(host=host, allow_plaintext=True)).check_network()
    files = files_of(tmp_path, "instance", StackCa())
    InstanceSettings(model=model, server=ListenSettings(host=host), tls=TlsSettings(**files.section())).check_network()
    InstanceSettings(model=model, server=ListenSettings(host="127.0.0.1")).check_network()


async def called(address: str, tls: TlsFiles | None) -> list[grpc.StatusCode]:
    """How a call of each internal service ends."""
    async with open_channel(address, PATIENT, tls=tls) as opened:
        channel: Any = opened  # for calls with bytes that are no messages
        calls = [
            channel.stream_stream("/tandem.v1.DecodeService/Decode")(iter([b""]), timeout=TIMEOUT_S),
            channel.unary_stream("/tandem.v1.PrefillService/Prefill")(b"", timeout=TIMEOUT_S),
            channel.stream_stream("/tandem.v1.KvTransferService/Attach")(iter([b""]), timeout=TIMEOUT_S),
            channel.unary_unary("/tandem.v1.KvTransferService/Release")(b"", timeout=TIMEOUT_S),
            channel.unary_unary("/tandem.v1.InstanceService/Drain")(b"", timeout=TIMEOUT_S),
        ]
        return [await call.code() for call in calls]


@pytest.mark.parametrize("role", [PREFILL, DECODE], ids=["prefill", "decode"])
async def test_with_tls_internal_calls_require_a_certificate(tmp_path: Path, role: Any) -> None:
    authority = StackCa()
    files = files_of(tmp_path, "instance", authority)
    async with running(tmp_path, role, tls=files.section(client_names=("router", "instance"))) as rig:
        address = rig.server.address
        for tls in (None, TlsFiles(files.ca), files_of(tmp_path, "stranger", StackCa("other"), authority).tls()):
            assert set(await called(address, tls)) == {grpc.StatusCode.UNAVAILABLE}
        client = files_of(tmp_path, "client", authority)
        denied = [grpc.StatusCode.PERMISSION_DENIED] * 5
        if role is not PREFILL:
            denied[1] = grpc.StatusCode.UNIMPLEMENTED
        assert await called(address, client.tls()) == denied
        async with open_channel(address, PATIENT, tls=files.tls()) as channel:
            stub = instance_pb2_grpc.InstanceServiceStub(channel)
            info = await stub.GetInstanceInfo(instance_pb2.GetInstanceInfoRequest(), timeout=TIMEOUT_S)
            assert info.instance_id
