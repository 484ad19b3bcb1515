"""The contract every store keeps; a new store subclasses `StoreContract` and gives the fixture `store`."""

from __future__ import annotations

import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import ArtifactCorrupt, ObjectExists, ObjectMissing, PreconditionFailed
from storage.filesystem import Store
from storage.memory import MemoryStore
from storage.opening import probe, reach


class StoreContract:
    races = 20
    many = 1100

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
        for round_ in range(self.races):
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
        assert sorted(store.list("a", "a/1")) == ["a/b/2"]
        assert store.list("a", "a/c") == []

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
        reach(store, "runs/x")
        probe(store, "runs/x")
        assert store.list("runs") == []

    def test_reading_past_the_end_gives_what_is_there(self, store: Store) -> None:
        store.create("a", b"0123")
        assert (store.read("a", 2, 100), store.read("a", 100), store.read("a", 1, 1)) == (b"23", b"", b"")
        with pytest.raises(ObjectMissing):
            store.read("b", 1, 1)

    def test_keys_with_unusual_characters_stay_apart(self, store: Store) -> None:
        keys = ["k/a b", "k/a+b", "k/a%20b", "k/é", "k/a=b&c"]
        for key in keys:
            store.create(key, key.encode())
        assert sorted(store.list("k")) == sorted(keys)
        assert [store.read(key) for key in keys] == [key.encode() for key in keys]
        assert store.delete(keys) == []
        assert store.list("k") == []

    def test_a_listing_of_more_than_one_page_is_complete(self, store: Store) -> None:
        keys = [f"many/{number:05d}" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.create(key, b"x"), keys))
        assert sorted(store.list("many")) == keys
        assert store.delete(keys) == []
        assert store.list("many") == []

    def test_an_object_of_many_megabytes_comes_back_unchanged(self, store: Store) -> None:
        data = random.Random(0).randbytes(9_000_001)
        store.create("big", data)
        assert store.read("big") == data
        assert store.read("big", 8_000_000, 8_000_010) == data[8_000_000:8_000_010]

    def test_a_pickled_store_is_the_same_place_and_holds_no_data_of_ours(self, store: Store) -> None:
        if not isinstance(store, MemoryStore):
            store.create("a", b"x")
            assert pickle.loads(pickle.dumps(store)).read("a") == b"x"
