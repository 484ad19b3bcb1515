"""A pin holds a checkpoint as long as it is young, and never longer than its reader needs it."""

from __future__ import annotations

import pytest

from storage.clock import VirtualClock
from storage.errors import StorageUnusable
from storage.filesystem import Bytes
from storage.memory import MemoryStore
from storage.pins import holding, pin, pinned, unpin
from storage.runs import RunPaths

A, B = "000000003-000001.json", "000000006-000001.json"


def test_a_checkpoint_is_pinned_until_its_last_reader_unpins_it() -> None:
    store, clock = MemoryStore(), VirtualClock(100)
    first, second = (pin(store, "r", A, "fork b", clock) for _ in range(2))
    other = pin(store, "r", B, "diff", clock)
    assert first != second
    assert pinned(store, "r", clock, 60) == {A, B}
    unpin(store, "r", first)
    assert pinned(store, "r", clock, 60) == {A, B}
    unpin(store, "r", second)
    assert pinned(store, "r", clock, 60) == {B}
    unpin(store, "r", other)
    assert pinned(store, "r", clock, 60) == set()


def test_a_pin_that_its_reader_left_behind_grows_old() -> None:
    store, clock = MemoryStore(), VirtualClock(100)
    pin(store, "r", A, "killed", clock)
    clock.advance(60)
    assert pinned(store, "r", clock, 60) == {A}
    clock.advance(1)
    pin(store, "r", B, "young", clock)
    assert pinned(store, "r", clock, 60) == {B}
    assert pinned(store, "r", VirtualClock(0), 60) == {A, B}, "a clock that went back unpins nothing"


def test_a_pin_that_cannot_be_read_counts(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = MemoryStore(), VirtualClock(1e9)
    store.create(RunPaths("r").pin(A, "x"), b"{broken")
    assert pinned(store, "r", clock, 60) == {A}
    assert "decision=counts" in caplog.text


def test_a_reader_that_fails_leaves_no_pin() -> None:
    store, clock = MemoryStore(), VirtualClock()

    def fails() -> None:
        with holding(store, "r", A, "diff", clock):
            assert pinned(store, "r", clock, 60) == {A}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert store.list(RunPaths("r").pins) == []


def test_a_store_that_takes_no_pin_is_read_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class ReadOnly(MemoryStore):
        def create(self, key: str, data: Bytes) -> None:
            raise StorageUnusable(key, expected="a writer", action="none")

    with holding(ReadOnly(), "r", A, "diff", VirtualClock()):
        assert "decision=read_without" in caplog.text


def test_a_pin_that_cannot_be_deleted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Undeletable(MemoryStore):
        def delete(self, keys: object) -> list[str]:
            return list(keys)  # type: ignore[call-overload]

    with holding(Undeletable(), "r", A, "diff", VirtualClock()):
        pass
    assert "decision=let_it_grow_old" in caplog.text
