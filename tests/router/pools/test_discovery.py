"""Where a pool's addresses come from: what a person may write, and what the DNS says of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.pools.discovery import (
    CombinedDiscovery,
    DnsDiscovery,
    ServiceDiscovery,
    StaticDiscovery,
    Target,
    discovery_of,
    follow,
    parse_targets,
    resolve,
)
from router.pools.settings import PoolSettings
from router.settings import RouterSettings
from serving.settings import SettingsError, load
from tests.waiting import until

QUICK_S = 0.02


# What a person may write


def test_a_list_names_addresses_and_names() -> None:
    assert parse_targets("a:1, b:2,a:1,") == (Target("a", 1, False), Target("b", 2, False))
    assert parse_targets("[::1]:50051")[0].address == "[::1]:50051"
    assert parse_targets("dns:decode.tandem.svc:50051") == parse_targets("dns:///decode.tandem.svc:50051")
    assert parse_targets("dns:decode:50051, 10.0.0.1:50051") == (
        Target("decode", 50051, True),
        Target("10.0.0.1", 50051, False),
    )
    assert parse_targets("") == ()


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("decode", "decode:50051, for example"),
        ("dns:decode", "dns:decode:50051, for example"),
        ("dns:///decode", "dns:///decode:50051, for example"),
        ("dns:///decode:0", "1 to 65535"),
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
        parse_targets(f"good:1,{wrong}")
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

    def discovery(self) -> ServiceDiscovery:
        return discovery_of("dns:decode:50051", QUICK_S, self)


NOBODY = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
FAILURE = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def yielded(discovery: ServiceDiscovery, dns: Dns, num_questions: int) -> list[set[str]]:
    """Every set that the discovery yields during that many resolutions."""
    sets: list[set[str]] = []

    async def follow() -> None:
        async for addresses in discovery.addresses():
            sets.append(set(addresses))

    following = asyncio.create_task(follow())
    await until(lambda: dns.num_questions >= num_questions)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    return sets


async def test_a_name_is_resolved_again_and_a_change_is_yielded_once() -> None:
    dns = Dns({"a", "b"}, {"b", "a"}, {"b", "c"})
    assert await yielded(dns.discovery(), dns, 5) == [{"a", "b"}, {"b", "c"}]


NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize("failure", [FAILURE, OSError("no network"), UnicodeError("label too long"), NO_THREAD])
async def test_a_failure_keeps_what_is_known(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    dns = Dns({"a"}, *[failure] * 9, {"b"})
    assert await yielded(dns.discovery(), dns, 12) == [{"a"}, {"b"}]
    assert caplog.text.count("cannot be resolved") == 1


async def test_nothing_is_yielded_before_the_first_answer() -> None:
    dns = Dns(*[FAILURE] * 5, {"a"})
    assert await yielded(dns.discovery(), dns, 7) == [{"a"}]


async def test_an_empty_answer_is_believed_when_it_comes_again_and_again() -> None:
    blink = Dns({"a"}, NOBODY, set(), {"a"})
    assert await yielded(blink.discovery(), blink, 6) == [{"a"}]
    gone = Dns({"a"}, NOBODY, set(), NOBODY)
    assert await yielded(gone.discovery(), gone, 6) == [{"a"}, set()]


async def test_failures_between_empty_answers_do_not_make_them_true() -> None:
    dns = Dns({"a"}, NOBODY, FAILURE, FAILURE, FAILURE, {"a"})
    assert await yielded(dns.discovery(), dns, 8) == [{"a"}]


async def test_fixed_addresses_and_names_are_joined() -> None:
    dns = Dns({"a"}, {"b"})
    sets = await yielded(discovery_of("fixed:1, dns:decode:50051", QUICK_S, dns), dns, 4)
    assert sets[-1] == {"fixed:1", "b"}
    assert all("fixed:1" in each for each in sets)


async def test_what_goes_wrong_with_one_part_is_logged_and_the_part_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        num_begun = 0

        async def addresses(self) -> AsyncIterator[frozenset[str]]:
            self.num_begun += 1
            yield frozenset({f"b{self.num_begun}"})
            if self.num_begun < 4:
                raise RuntimeError("a fault that the test asked for")

    monkeypatch.setattr("router.pools.discovery._RETRY_S", 0.001)
    parts: list[ServiceDiscovery] = [
        DnsDiscovery("decode", 50051, QUICK_S, Dns({"a"})),
        StaticDiscovery(["c"]),
        Broken(),
    ]
    seen: list[frozenset[str]] = []
    following = asyncio.create_task(follow(CombinedDiscovery(parts), seen.append, "addresses"))
    await until(lambda: frozenset({"a", "b4", "c"}) in seen)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    first = next(index for index, addresses in enumerate(seen) if {"a", "c"} <= addresses)
    assert all({"a", "c"} <= addresses for addresses in seen[first:])
    logged = [record.getMessage() for record in caplog.records if record.exc_info is not None]
    assert logged == [
        f"some addresses of a pool are no longer followed; the next attempt is in {retry_s} s"
        for retry_s in ("0.001", "0.002", "0.004")
    ]


async def test_a_union_that_begins_again_has_no_fewer_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part answers at once, and a resolver may not."""
    monkeypatch.setattr("router.pools.discovery._RETRY_S", 0.001)
    dns = Dns({"a"})
    union = CombinedDiscovery([StaticDiscovery(["c"]), DnsDiscovery("decode", 50051, QUICK_S, dns)])
    seen: list[frozenset[str]] = []

    def take(addresses: frozenset[str]) -> None:
        seen.append(addresses)
        if addresses == {"a", "c"} and dns.answers != [FAILURE]:
            dns.answers = [FAILURE]
            raise RuntimeError("a fault that the test asked for")

    following = asyncio.create_task(follow(union, take, "addresses"))
    await until(lambda: len(seen) >= 2 and seen[-2:] == [{"a", "c"}] * 2)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_discovery_that_begins_again_yields_what_it_knows() -> None:
    dns = Dns({"a"})
    discovery = dns.discovery()
    assert await yielded(discovery, dns, 3) == [{"a"}]
    assert await yielded(discovery, dns, 6) == [{"a"}]


async def test_questions_are_spread_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    dns = Dns({"a"})
    discovery = DnsDiscovery("decode", 50051, 10.0, dns)
    monkeypatch.setattr("router.pools.discovery.asyncio.sleep", noted)
    questions = discovery.addresses()
    reading = asyncio.ensure_future(anext(questions))
    await reading
    reading = asyncio.ensure_future(anext(questions))
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
