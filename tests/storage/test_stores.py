"""The contract every store keeps; a new store subclasses `StoreContract`."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from storage.errors import (
    ArtifactCorrupt,
    CommitUnknown,
    ObjectExists,
    ObjectMissing,
    PreconditionFailed,
    StorageUnusable,
    StoreUnavailable,
)
from storage.filesystem import Bytes, Store
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.opening import open_store, probe


class StoreContract:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    def test_an_object_reads_back_whole_and_in_ranges(self, store: Store) -> None:
        store.create("a/b", b"0123456789")
        assert store.read("a/b") == b"0123456789"
        assert store.read("a/b", 3) == b"3456789"
        assert store.read("a/b", 3, 5) == b"34"
        assert store.size("a/b") == 10

    def test_buffers_of_every_kind_are_accepted(self, store: Store) -> None:
        for name, data in {"bytes": b"x", "bytearray": bytearray(b"x"), "memoryview": memoryview(b"x")}.items():
            store.create(f"k/{name}", data)
            assert store.read(f"k/{name}") == b"x"

    def test_creation_is_exclusive_and_leaves_the_first_content(self, store: Store) -> None:
        store.create("a", b"first")
        with pytest.raises(ObjectExists) as caught:
            store.create("a", b"second")
        assert isinstance(caught.value, FileExistsError)
        assert store.read("a") == b"first"

    def test_an_empty_object_is_exclusive_too(self, store: Store) -> None:
        store.create("a", b"first")
        with pytest.raises(ObjectExists):
            store.create("a", b"")
        assert store.read("a") == b"first"

    def test_of_many_racing_creators_exactly_one_wins(self, store: Store) -> None:
        for round_ in range(20):
            won: list[bytes] = []
            barrier = threading.Barrier(8)

            def create(
                name: bytes, won: list[bytes] = won, barrier: threading.Barrier = barrier, r: int = round_
            ) -> None:
                barrier.wait()
                try:
                    store.create(f"race/{r}", name)
                    won.append(name)
                except ObjectExists:
                    return

            threads = [threading.Thread(target=create, args=(str(i).encode() * 1000,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1
            assert store.read(f"race/{round_}") == won[0]

    def test_a_missing_object_is_a_typed_error(self, store: Store) -> None:
        with pytest.raises(ObjectMissing) as caught:
            store.read("nothing")
        assert isinstance(caught.value, FileNotFoundError)
        assert store.size("nothing") is None

    def test_listing_sees_what_lies_below_a_folder_only(self, store: Store) -> None:
        for key in ("a/1", "a/b/2", "ab/3"):
            store.create(key, b"x")
        assert sorted(store.list("a")) == ["a/1", "a/b/2"]
        assert store.list("nothing") == []

    def test_deleting_is_idempotent(self, store: Store) -> None:
        store.create("a/1", b"x")
        assert store.delete(["a/1", "a/2"]) == []
        assert store.size("a/1") is None

    def test_swap_replaces_only_what_was_read(self, store: Store) -> None:
        token = store.swap("low", b"1", None)
        with pytest.raises(PreconditionFailed):
            store.swap("low", b"2", None)
        assert store.read_versioned("low") == (b"1", token)
        second = store.swap("low", b"2", token)
        with pytest.raises(PreconditionFailed):
            store.swap("low", b"3", token)
        assert store.read_versioned("low") == (b"2", second)

    def test_no_swap_is_lost_under_contention(self, store: Store) -> None:
        store.swap("counter", b"0", None)

        def add() -> None:
            for _ in range(10):
                while True:
                    value, token = store.read_versioned("counter")
                    try:
                        store.swap("counter", str(int(value) + 1).encode(), token)
                        break
                    except PreconditionFailed:
                        continue

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.read("counter") == b"40"

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/.", "a\\b", "a\0b"])
    def test_keys_that_leave_the_store_are_refused(self, store: Store, key: str) -> None:
        with pytest.raises(ArtifactCorrupt, match="path_outside"):
            store.create(key, b"x")
        with pytest.raises(ArtifactCorrupt, match="path_outside"):
            store.read(key)

    def test_the_probe_accepts_it_and_leaves_nothing(self, store: Store) -> None:
        probe(store, "runs/x")
        assert store.list("runs") == []


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return MemoryStore("test")


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "store")

    def test_a_killed_writer_leaves_only_a_temporary_name(self, store: LocalStore, tmp_path: Path) -> None:
        store.create("a/1", b"x")
        (tmp_path / "store" / "a" / ".tmp-1-dead").write_bytes(b"half")
        assert store.list("a") == ["a/1"]
        assert store.sweep("a") == 1
        assert [path.name for path in (tmp_path / "store" / "a").iterdir()] == ["1"]

    def test_a_full_disk_leaves_nothing_and_can_be_retried(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(handle: int, data: Bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StoreUnavailable, match="No space left"):
                store.create("a/1", b"x")
        assert list((tmp_path / "store" / "a").iterdir()) == []
        store.create("a/1", b"x")
        assert store.read("a/1") == b"x"

    def test_an_entry_that_could_not_be_synced_is_unknown(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.create("a/0", b"x")

        def broken(folder: Path) -> None:
            raise OSError(errno.EIO, "I/O error")

        monkeypatch.setattr(store, "_sync_folder", broken)
        with pytest.raises(CommitUnknown):
            store.create("a/1", b"x")

    def test_a_place_that_is_no_folder_is_unusable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageUnusable):
            LocalStore(tmp_path / "file").create("a", b"x")


def test_a_store_that_overwrites_is_refused() -> None:
    class Overwriting(MemoryStore):
        def create(self, key: str, data: Bytes) -> None:
            self._objects[key] = bytes(data)

    store = Overwriting()
    with pytest.raises(StorageUnusable, match="created the same object twice"):
        probe(store, "runs/x")
    assert store.list("runs") == []


def test_a_store_that_ignores_preconditions_is_refused() -> None:
    class Ignoring(MemoryStore):
        def swap(self, key: str, data: Bytes, token: str | None) -> str:
            return super().swap(key, data, None if self.size(key) is None else self.read_versioned(key)[1])

    with pytest.raises(StorageUnusable, match="failed precondition"):
        probe(Ignoring(), "runs/x")


def test_urls_open_their_store_and_others_are_refused(tmp_path: Path) -> None:
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert open_store("memory://x") is open_store("memory://x")
    for url in ("gopher://x", "file://", ""):
        with pytest.raises(StorageUnusable):
            open_store(url)
