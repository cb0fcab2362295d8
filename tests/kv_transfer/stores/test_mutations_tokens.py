"""A sample of the mutations between two real engines: the pages change after the prefill engine has written them and
before the decode engine reads them, and every token is the aggregated engine's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from engine import SamplingParams
from engine.config import EngineConfig, KVConnectorConfig
from kv_transfer.page.format import HEADER_BYTES
from kv_transfer.secret import load_secret
from kv_transfer.stores.connector import StoreConnector
from tests.kv_transfer.core_pair import CorePair, aggregated, store_config
from tests.kv_transfer.stores.mutations import NUM_PAGES, Written, catalogue
from tests.kv_transfer.stores.redis.redis_server import redis_server

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_SAMPLE, _ALL = 101, 808


class MutatedPair(CorePair):
    """What the prefill engine announces is held back until the test lets go."""

    def __init__(self, config: EngineConfig, key: bytes) -> None:
        super().__init__(config)
        self.hold_back = True
        self._key = key

    @property
    def connector(self) -> StoreConnector:
        assert isinstance(self.decode._connector, StoreConnector)
        return self.decode._connector

    def prefill_all(self) -> None:
        """Step until every page of every request is in the store."""

        def is_written() -> bool:
            failed = [event.reason for event in self.held_back if event.ended == "failed"]
            assert not failed, failed
            return sum(event.num_tokens is not None for event in self.held_back) == len(self.outcomes)

        self.run_until(is_written)

    def written(self, name: str) -> Written:
        """What the prefill engine has written for a request."""
        load = self.connector._loader._loads[name]
        payloads = [bytearray(page.spec.payload_bytes) for page in load.pages]
        for page, payload in zip(load.pages, payloads, strict=True):
            found = self.connector._store.get_into(page.key, (bytearray(HEADER_BYTES), payload), lambda: None)
            assert found, "the prefill engine says that it is there"
        return Written(list(load.pages), [bytes(payload) for payload in payloads], self._key)


@contextmanager
def redis_config(tmp_path: Path) -> Iterator[dict[str, object]]:
    with redis_server(tmp_path) as server:
        # A slow machine is not a dead Redis.
        options = {
            "url": server.url,
            "kv_secret_file": str(tmp_path / "secret"),
            "timeout_s": 10.0,
            "connect_timeout_s": 10.0,
        }
        class_path = "kv_transfer.stores.redis.connector:RedisConnector"
        yield {"kv_connector": KVConnectorConfig(class_path=class_path, options=options)}


@contextmanager
def folder_config(tmp_path: Path) -> Iterator[dict[str, object]]:
    del tmp_path
    yield {}


def check_sample(pair: MutatedPair, checkpoint: Path, num_mutations: int) -> None:
    """Mutate one request's pages each, then compare all answers."""
    mutations = catalogue(digest=True)
    mutations = mutations[:: len(mutations) // num_mutations][:num_mutations]
    source = random.Random("prompts")
    prompts = [
        [source.randrange(1024) for _ in range(source.randrange(16 * NUM_PAGES, 16 * (NUM_PAGES + 3)))]
        for _ in range(num_mutations)
    ]
    for index, prompt in enumerate(prompts):
        pair.start(f"r{index}", prompt, GREEDY)
    # STEP every page is written, then one of each request changes (or two)
    pair.prefill_all()
    for number, mutation in enumerate(mutations):
        written = pair.written(f"r{number}")
        for index, value in mutation.change(written, number % NUM_PAGES).items():
            assert value != written.value(index), f"{mutation.label} changes nothing"
            pair.connector._store.put(written.names[index].key, (value,))
    # STEP no token differs, but every mutation is counted
    pair.let_go()
    pair.run()
    answers = [pair.outcomes[f"r{index}"].token_ids for index in range(num_mutations)]
    assert answers == aggregated(checkpoint, prompts, GREEDY)
    num_recomputed = 0
    for number, mutation in enumerate(mutations):
        loaded = pair.outcomes[f"r{number}"].loaded
        assert loaded is not None
        assert loaded.num_recomputed_blocks > 0, f"{mutation.label} went unnoticed"
        num_recomputed += loaded.num_recomputed_blocks
    counters = pair.connector.counters
    assert sum(counters.loaded.failures.values()) >= num_mutations
    assert pair.decode.load.num_recomputed_blocks == num_recomputed
    assert not pair.connector._io.load_breaker.is_open
    print(f"{pair.connector.name}: {num_mutations} mutations, {num_recomputed} blocks recomputed, no token differs")
    # STEP both engines serve on
    pair.start("after", prompts[0][::-1], GREEDY)
    pair.run()
    after = pair.outcomes["after"]
    assert after.loaded is not None
    assert (after.loaded.num_recomputed_blocks, after.token_ids) == (
        0,
        *aggregated(checkpoint, [prompts[0][::-1]], GREEDY),
    )
    pair.close()


@pytest.mark.parametrize(
    "config", [folder_config, pytest.param(redis_config, marks=pytest.mark.slow)], ids=["shared_storage", "redis"]
)
@pytest.mark.parametrize("num_mutations", [_SAMPLE, pytest.param(_ALL, marks=pytest.mark.slow)])
def test_mutated_pages_change_no_token(
    checkpoint: Path,
    tmp_path: Path,
    config: Callable[[Path], AbstractContextManager[dict[str, object]]],
    num_mutations: int,
) -> None:
    with config(tmp_path) as settings:
        engine = store_config(checkpoint, tmp_path, num_blocks=8192, max_num_seqs=1024, **settings)
        pair = MutatedPair(engine, load_secret(str(tmp_path / "secret")))
        check_sample(pair, checkpoint, num_mutations)
