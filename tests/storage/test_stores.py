"""Memory and local files: the contract, and what is special to each."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import (
    CommitUnknown,
    ObjectExists,
    StorageUnusable,
    StoreUnavailable,
)
from storage.filesystem import Bytes, Store
from storage.local import LocalStore, leftover
from storage.memory import MemoryStore
from storage.opening import open_store, probe
from tests.storage.contract import StoreContract


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

    def test_what_killed_writers_left_is_told_from_what_is_being_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path / "store", unnamed=False)
        script = (
            "import os, signal, sys, storage.local as local\n"
            "local.os.link = lambda one, other: os.kill(os.getpid(), signal.SIGKILL)\n"
            "local.LocalStore(sys.argv[1], unnamed=False).create('a/dead', b'half')"
        )
        killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=False)
        assert killed.returncode == -signal.SIGKILL
        (dead,) = (tmp_path / "store" / "a").iterdir()
        names = {
            "of another process": dead.name.replace(socket.gethostname(), "elsewhere"),
            "of process 1": re.sub(r"-\d+-", "-1-", dead.name, count=1),
            "of a dead one with our number": re.sub(r"-\d+-", f"-{os.getpid()}-", dead.name, count=1),
            "of somebody else's": ".tmp-notes",
        }
        for name in names.values():
            (dead.parent / name).touch()
        with monkeypatch.context() as patch:
            inside: list[list[str]] = []
            patch.setattr(store, "_sync_folder", lambda folder: None)
            patch.setattr(os, "fsync", lambda handle: inside.append(leftover(store, "a")))
            store.create("a/mine", b"x")
        left = sorted(f"a/{name}" for name in (dead.name, names["of a dead one with our number"]))
        assert inside == [left], "not what this process is writing"
        assert leftover(store, "nothing") == []
        assert store.delete(left) == []
        assert leftover(store, "a") == []
        assert store.list("a") == ["a/mine"]

    def test_a_temporary_name_that_cannot_be_removed_changes_no_outcome(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = LocalStore(tmp_path / "store", unnamed=False)

        def broken(path: Path) -> None:
            raise OSError(errno.EIO, "I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", broken)
            store.create("a/1", b"x")
            with pytest.raises(ObjectExists):
                store.create("a/1", b"y")
        assert store.read("a/1") == b"x"
        assert caplog.text.count("decision=leave_it") == 2
        assert store.list("a") == ["a/1"]

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

        def broken(folder: str) -> None:
            raise OSError(errno.EIO, "I/O error")

        monkeypatch.setattr(store, "_sync_folder", broken)
        with pytest.raises(CommitUnknown):
            store.create("a/1", b"x")

    def test_a_place_that_is_no_folder_is_unusable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageUnusable):
            LocalStore(tmp_path / "file").create("a", b"x")


class TestLocalWithTemporaryNames(TestLocal):
    """A file system that has no files without a name."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        opened = os.open

        def refusing(path: str, flags: int, *args: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
            return opened(path, flags, *args)

        monkeypatch.setattr(os, "open", refusing)
        return LocalStore(tmp_path / "store")


def test_a_writer_that_dies_before_the_object_is_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def dies(handle: int) -> None:
        raise Killed

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(os, "fsync", dies)
    monkeypatch.setattr(os, "unlink", dies)  # nobody cleans up after a kill
    with pytest.raises(Killed):
        LocalStore(tmp_path).create("a/1", b"x")
    assert list((tmp_path / "a").iterdir()) == []


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
