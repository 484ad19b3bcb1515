"""A disk that is full, read-only or broken under each kind of write of a run: the run waits, says so, and goes on by
itself when it can; what a person must mend ends it, and it goes on after that."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu.rollout import archiving
from storage import local
from storage.errors import StorageUnusable, StoreUnavailable
from storage.local import LocalStore, leftover
from storage.opening import open_store
from storage.verify import verify
from tasks import publish
from tests.faults.campaign.places import local_place
from tests.faults.dying import RUN, furnish, house_of
from tests.faults.house import House, until


class Disk:
    """The operating system as `storage.local` sees it. While `fails` says so of a path, the call named `call` raises
    `number`; a write first writes half. Without a call: everything that changes the disk."""

    def __init__(self, number: int, call: str, fails: Callable[[str], bool]) -> None:
        self._number, self._call, self._fails = number, call, fails
        self.hits: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _raise_if(self, call: str, path: str) -> None:
        if self._call in ("", call) and self._fails(path):
            self.hits.append(path)
            raise OSError(self._number, os.strerror(self._number))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._raise_if("open", str(path))
        elif flags & os.O_TMPFILE == os.O_TMPFILE:
            self._raise_if("open", f"{path}/")
        return os.open(path, flags, mode)

    def write(self, handle: int, data: memoryview) -> int:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if self._call == "write" and self._fails(path):
            os.write(handle, data[: len(data) // 2])
        self._raise_if("write", path)
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        folder = os.path.isdir(path)
        self._raise_if("fsync of the folder" if folder else "fsync", f"{path}/" if folder else path)
        os.fsync(handle)

    def link(self, one: Path, other: Path, **how: Any) -> None:
        self._raise_if("link", str(other))
        os.link(one, other, **how)


CALLS = {"write": errno.ENOSPC, "open": errno.EDQUOT, "link": errno.ENOSPC, "fsync": errno.EIO,
         "fsync of the folder": errno.EIO}  # fmt: skip
KINDS = ["journal", "payload", "objects", "checkpoints", "ledger"]
TIMES = 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(publish, "PAUSE_S", 0.0)
    monkeypatch.setattr(archiving, "MAX_BACKOFF_S", 0.01)
    return monkeypatch


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        pytest.param(kind, call, marks=() if call == "write" or kind == "journal" else pytest.mark.slow)
        for kind in KINDS
        for call in CALLS
    ],
)
async def test_a_write_that_the_disk_refuses_for_a_while_is_repeated_and_nobody_has_to_mend_anything(
    kind: str, call: str, tmp_path: Path, impatient: pytest.MonkeyPatch
) -> None:
    house = whole_house(tmp_path, impatient)

    def fails(path: str) -> bool:
        late = "manager" in house.cluster.processes and house.manager().control.ledger.step >= 2
        return late and f"/{RUN}/{kind}/" in path and len(disk.hits) < TIMES

    disk = Disk(CALLS[call], call, fails)
    impatient.setattr(local, "os", disk)
    await house.run(retries=1)
    report = house.check()
    assert len(disk.hits) == TIMES
    assert (report.incarnations, report.steps_diverged) == (1, 0)
    assert report.checkpoints >= 2
    assert not list((tmp_path / "runs").rglob(".tmp-*"))


@pytest.mark.parametrize("kind", ["run.json", "the first segment"])
async def test_a_disk_that_is_full_at_the_start_ends_the_attempt_and_the_next_one_starts(
    kind: str, tmp_path: Path, impatient: pytest.MonkeyPatch
) -> None:
    folder = f"/runs/{RUN}" if kind == "run.json" else f"/runs/{RUN}/journal"

    def fails(path: str) -> bool:
        return path.removeprefix(str(tmp_path)).rpartition("/")[0] == folder and not disk.hits and probed(tmp_path)

    disk = Disk(errno.ENOSPC, "write", fails)
    with impatient.context() as patch:
        patch.setattr(local, "os", disk)
        with pytest.raises(StoreUnavailable, match="No space left"):
            await whole_house(tmp_path, impatient).run(retries=1)
    again = whole_house(tmp_path, impatient)
    await again.run(retries=1)
    assert len(disk.hits) == 1
    again.check()


def probed(folder: Path) -> bool:
    """The probe of a new store is over: the write of run.json comes next."""
    return not list((folder / "runs" / RUN).glob("probe-*"))


async def test_a_disk_that_becomes_read_only_ends_the_run_as_the_users_matter_and_it_goes_on_after_that(
    tmp_path: Path, impatient: pytest.MonkeyPatch
) -> None:
    house = whole_house(tmp_path, impatient)
    disk = Disk(errno.EROFS, "", lambda path: house.manager().control.ledger.step >= 3)
    with impatient.context() as patch:
        patch.setattr(local, "os", disk)
        with pytest.raises(StorageUnusable, match="Read-only file system") as caught:
            await until_started(house, patch, disk)
    assert caught.value.exit_code == 2
    assert disk.hits
    left = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "runs").rglob(".tmp-*")]
    assert left == leftover(LocalStore(tmp_path), "runs") == []
    again = whole_house(tmp_path, impatient)
    await again.run(retries=1)
    assert again.check().incarnations == 2


async def until_started(house: House, patch: pytest.MonkeyPatch, disk: Disk) -> None:
    patch.setattr(local, "os", os)

    async def later(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes)
        patch.setattr(local, "os", disk)

    await house.run(later, retries=1)


async def test_a_real_disk_without_room_is_waited_for(tmp_path: Path, impatient: pytest.MonkeyPatch) -> None:
    """A small file system of its own (where this user may mount one) is filled to the last byte, and freed later."""
    with local_place(tmp_path) as place:
        if not place.small:
            pytest.skip("this user may not mount a file system; the other tests stand for it")
        store = open_store(place.url("r"))
        furnish(impatient, store)
        house = house_of(place.folder, store)

        async def fill(house: House) -> None:
            await until(lambda: "manager" in house.cluster.processes and house.manager().control.ledger.step >= 2)
            await asyncio.to_thread(place.fill)
            await until(lambda: "No space left" in house.manager().committer.waits_for)
            await asyncio.sleep(0.3)
            place.free()

        await house.run(fill, retries=1)
        assert house.check().incarnations == 1
        assert verify(store, RUN).sound


def whole_house(folder: Path, patch: pytest.MonkeyPatch) -> House:
    store = LocalStore(folder)
    furnish(patch, store)
    return house_of(folder, store)
