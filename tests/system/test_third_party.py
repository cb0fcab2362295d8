"""The example of a third party's connector keeps what docs/connectors asks of one, without a stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import EngineError
from kv_transfer.stores.base import StoreError
from tests.kv_transfer.stores.contract import HEADER, PAGE, check_contract, key_of, read
from tests.system.third_party import SqliteConnector, SqliteStore, open_pages


def test_its_store_keeps_the_contract(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    check_contract(store)
    store.close()


def test_a_file_that_cannot_be_used_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    pages = open_pages(tmp_path)
    pages.execute("DROP TABLE pages")
    pages.close()
    with pytest.raises(StoreError):
        read(store, key_of(1))
    with pytest.raises(StoreError):
        store.put(key_of(1), (HEADER, PAGE))
    store.close()


def test_a_wrong_option_is_named_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"options of the sqlite connector: .*`pth`; known: .*path"):
        SqliteConnector(wake=lambda: None, path=str(tmp_path), pth="x")
