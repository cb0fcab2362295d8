"""Where a pool's addresses come from, and what becomes of an instance whose address goes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.app import RouterApp
from router.config import PoolSettings, RouterSettings
from router.model import ServedModel
from router.pools.membership import (
    DnsMembership,
    JoinedMembership,
    Membership,
    StaticMembership,
    Target,
    membership_of,
    resolve,
    targets,
)
from serving.settings import SettingsError, load
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.rig import Rig, settings_of, slow

QUICK_S = 0.02


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# What a person may write


def test_a_list_names_addresses_and_names() -> None:
    assert targets("a:1, b:2,a:1,") == (Target("a", 1, False), Target("b", 2, False))
    assert targets("[::1]:50051")[0].address == "[::1]:50051"
    assert targets("dns:decode.tandem.svc:50051") == targets("dns:///decode.tandem.svc:50051")
    assert targets("dns:decode:50051, 10.0.0.1:50051") == (
        Target("decode", 50051, True),
        Target("10.0.0.1", 50051, False),
    )
    assert targets("") == ()


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("decode", "decode:50051, for example"),
        ("dns:decode", "dns:decode:50051, for example"),
        ("http://decode:1", "without a scheme: decode:1"),
        ("::1:50051", "[::1]:50051"),
        ("decode:0", "1 to 65535"),
        ("decode:65536", "1 to 65535"),
        ("decode:http", "1 to 65535"),
        (":50051", "host:port"),
        ("a b:1", "host:port"),
        ("unix:/run/tandem.sock", "host:port"),
        ("a:1;b:2", "host:port"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(wrong: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="write host:port") as raised:
        targets(f"good:1,{wrong}")
    assert repr(wrong) in str(raised.value)
    assert remedy in str(raised.value)


def test_the_settings_refuse_it_with_the_setting_s_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dns:name:port"):
        PoolSettings(decode="decode")
    file = tmp_path / "router.yaml"
    file.write_text("router: {model: m}\npools: {prefill: nonsense}\n")
    with pytest.raises(SettingsError, match=r"pools\.prefill"):
        load(RouterSettings, config=file)


# What the DNS says


class Dns:
    """Answers, one per question; the last one again and again."""

    def __init__(self, *answers: set[str] | Exception) -> None:
        self.answers = list(answers)
        self.num_questions = 0

    async def __call__(self, host: str, port: int) -> frozenset[str]:
        assert (host, port) == ("decode", 50051)
        self.num_questions += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return frozenset(answer)

    def membership(self) -> Membership:
        return membership_of("dns:decode:50051", QUICK_S, self)


NOBODY = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
FAILURE = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def told(membership: Membership, dns: Dns, num_questions: int) -> list[set[str]]:
    """Every set that the membership tells while that many questions are asked."""
    sets: list[set[str]] = []

    async def follow() -> None:
        async for addresses in membership.addresses():
            sets.append(set(addresses))

    following = asyncio.create_task(follow())
    await until(lambda: dns.num_questions >= num_questions)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    return sets


async def test_a_name_is_resolved_again_and_a_change_is_told_once() -> None:
    dns = Dns({"a", "b"}, {"b", "a"}, {"b", "c"})
    assert await told(dns.membership(), dns, 5) == [{"a", "b"}, {"b", "c"}]


@pytest.mark.parametrize("failure", [FAILURE, OSError("no network"), UnicodeError("label too long")])
async def test_a_failure_keeps_what_is_known(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    dns = Dns({"a"}, *[failure] * 9, {"b"})
    assert await told(dns.membership(), dns, 12) == [{"a"}, {"b"}]
    assert caplog.text.count("cannot be resolved") == 1


async def test_nothing_is_told_before_the_first_answer() -> None:
    dns = Dns(*[FAILURE] * 5, {"a"})
    assert await told(dns.membership(), dns, 7) == [{"a"}]


async def test_an_empty_answer_is_believed_when_it_comes_again_and_again() -> None:
    blink = Dns({"a"}, NOBODY, set(), {"a"})
    assert await told(blink.membership(), blink, 6) == [{"a"}]
    gone = Dns({"a"}, NOBODY, set(), NOBODY)
    assert await told(gone.membership(), gone, 6) == [{"a"}, set()]


async def test_failures_between_empty_answers_do_not_make_them_true() -> None:
    dns = Dns({"a"}, NOBODY, FAILURE, FAILURE, FAILURE, {"a"})
    assert await told(dns.membership(), dns, 8) == [{"a"}]


async def test_fixed_addresses_and_names_are_joined() -> None:
    dns = Dns({"a"}, {"b"})
    sets = await told(membership_of("fixed:1, dns:decode:50051", QUICK_S, dns), dns, 4)
    assert sets[-1] == {"fixed:1", "b"}
    assert all("fixed:1" in each for each in sets)


async def test_what_goes_wrong_with_one_part_is_not_swallowed() -> None:
    class Broken:
        async def addresses(self) -> AsyncIterator[frozenset[str]]:
            raise RuntimeError("a fault of ours")
            yield frozenset()

    with pytest.raises(RuntimeError, match="a fault of ours"):
        async for _ in JoinedMembership([StaticMembership(["a"]), Broken()]).addresses():
            pass


async def test_questions_are_spread_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    dns = Dns({"a"})
    membership = DnsMembership("decode", 50051, 10.0, dns)
    monkeypatch.setattr("router.pools.membership.asyncio.sleep", noted)
    questions = membership.addresses()
    reading = asyncio.create_task(anext(questions))
    await reading
    reading = asyncio.create_task(anext(questions))
    while len(waits) < 50:
        await sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert all(8.0 <= seconds <= 12.0 for seconds in waits)
    assert len(set(waits)) > 10


async def test_the_system_s_resolver_finds_all_addresses_of_a_name() -> None:
    assert "127.0.0.1:7" in await resolve("localhost", 7)
    assert await resolve("::1", 7) == {"[::1]:7"}
    with pytest.raises(socket.gaierror):
        await resolve("no-such-name.invalid", 7)


# What becomes of the instances


class Changing:
    """A membership that a test changes."""

    def __init__(self, *fakes: FakeInstance) -> None:
        self._sets: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.now(*fakes)

    def now(self, *fakes: FakeInstance) -> None:
        self._sets.put_nowait(frozenset(fake.address for fake in fakes))

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self._sets.get()


@asynccontextmanager
async def routing(
    model: ServedModel,
    folder: Path,
    decode: list[FakeInstance],
    prefill: list[FakeInstance] | None = None,
    **sections: Any,
) -> AsyncIterator[tuple[Rig, Changing, Changing]]:
    """A router whose pools a test changes; begins with all the fakes."""
    prefill = prefill or []
    async with AsyncExitStack() as stack:
        for fake in [*prefill, *decode]:
            await stack.enter_async_context(fake)
        prefills, decodes = Changing(*prefill), Changing(*decode)
        app = RouterApp(settings_of(folder, [], [], **sections), model, prefill=prefills, decode=decodes)
        async with started(app, prefill, decode) as rig:
            await rig.until_ready()
            yield rig, prefills, decodes
            await rig.until_router_is_idle()


@asynccontextmanager
async def started(app: RouterApp, prefill: list[FakeInstance], decode: list[FakeInstance]) -> AsyncIterator[Rig]:
    """The router runs while inside."""
    await app.start()
    rig = Rig(app, prefill, decode)
    try:
        yield rig
    finally:
        await rig.channel.close()
        await app.stop()


def fakes(role: Any, *behaviours: Behaviour) -> list[FakeInstance]:
    return [FakeInstance(role, f"{role}-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.pools.pool._LINGER_S", 0.05)


async def test_an_address_that_appears_is_used(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", Behaviour(), Behaviour())
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        decodes.now(decode[0])
        await rig.until_ready(num_decode=1)
        await until(lambda: len(rig.app.pools.decode.members) == 1)
        assert (await rig.generate()).trailers["tandem-decode"] == "decode-0"
        decodes.now(*decode)
        await rig.until_ready()


async def test_a_stream_outlives_its_instance_s_address(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", slow(), Behaviour(num_running=9))
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await decode[0].until("token", 2)
        decodes.now(decode[1])  # it drains, so the DNS does not name it any more
        await rig.until_ready(num_decode=1)
        assert (await rig.generate(max_tokens=2)).trailers["tandem-decode"] == "decode-1"
        assert decode[0].num_open_calls == 1
        assert len(rig.app.pools.decode.members) == 2
        answer = await asking
        assert answer.is_exactly(40)
        assert answer.trailers["tandem-decode"] == "decode-0"
        assert not decode[0].recorded("decode cancelled")
        await until(lambda: len(rig.app.pools.decode.members) == 1)  # and only then it is let go


async def test_kv_of_a_prefill_instance_whose_address_has_gone_is_still_read(
    model: ServedModel, model_folder: Path
) -> None:
    # Its call is still open, and closing it would give up the KV under its reader.
    prefill = fakes("prefill", Behaviour(linger_s=60.0))
    decode = fakes("decode", Behaviour(load_s=0.4))
    async with routing(model, model_folder, decode, prefill) as (rig, prefills, _):
        asking = asyncio.create_task(rig.generate())
        await prefill[0].until("token")
        prefills.now()
        async with asyncio.timeout(20):
            while not decode[0].recorded("loaded"):
                assert rig.app.pools.prefill.members, "let go under its reader"
                await asyncio.sleep(0.01)
        assert (await asking).is_exactly(12)
        assert not decode[0].recorded("recomputed")
        await until(lambda: not rig.app.pools.prefill.members)


async def test_a_leaving_instance_that_dies_is_noticed(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", Behaviour(freeze_at=5, token_s=0.02), Behaviour(num_running=9))
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        await decode[0].until("token")
        decodes.now(decode[1])
        await decode[0].until("froze")
        answer = await asking
        assert answer.is_exactly(20)
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"
        await until(lambda: len(rig.app.pools.decode.members) == 1)


async def test_an_address_that_comes_back_in_time_was_never_away(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", slow())
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await decode[0].until("token")
        member = rig.app.pools.decode.members[0]
        decodes.now()
        await rig.until_ready(num_decode=0)
        assert member.state == "leaving"
        decodes.now(*decode)
        await rig.until_ready()
        assert (await asking).is_exactly(40)
        assert (await rig.generate()).is_exactly(12)
        assert rig.app.pools.decode.members == (member,)


async def test_two_addresses_of_one_process_are_one_instance(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", Behaviour(), Behaviour())
    async with routing(model, model_folder, decode[:1]) as (rig, _, decodes):
        port = decode[0].address.rpartition(":")[2]
        decodes._sets.put_nowait(frozenset({decode[0].address, f"localhost:{port}"}))
        await until(lambda: all(member.state == "ready" for member in rig.app.pools.decode.members))
        await until(lambda: len(rig.app.pools.decode.members) == 2)
        await until(rig.app.pools.decode.is_complete)
        assert rig.app.pools.decode.num_ready() == 1
        assert (await rig.generate()).is_exactly(12)


async def test_a_membership_that_breaks_is_told_and_its_last_instances_stay(
    model: ServedModel, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(Changing):
        async def addresses(self) -> AsyncIterator[frozenset[str]]:
            yield await self._sets.get()
            raise RuntimeError("a fault of ours")

    async with FakeInstance("decode") as fake:
        app = RouterApp(settings_of(model_folder, [], []), model, decode=Breaking(fake))
        async with started(app, [], [fake]) as rig:
            await rig.until_ready()
            assert (await rig.generate()).is_exactly(12)
    assert "no longer followed" in caplog.text


async def test_a_router_asks_the_dns_for_its_instances(model: ServedModel, model_folder: Path) -> None:
    async with FakeInstance("decode") as fake:
        port = fake.address.rpartition(":")[2]
        settings = settings_of(model_folder, [], [], pools={"decode": f"dns:localhost:{port}"})
        async with started(RouterApp(settings, model), [], [fake]) as rig:
            await rig.until_ready()
            assert (await rig.generate()).is_exactly(12)
