"""When what was retired is deleted: beside the run, and never while a publication could come to rely on it.

Why no recorded checkpoint ever refers to an object that is deleted:

* A publication relies on objects that it found: those of the newest checkpoint, which it does not write again, and
  those of any other that hold the same bytes. It begins with `newest_checkpoint` and ends with `publish_checkpoint`.
  From `begin` on nothing is deleted until a publication was recorded; `begin` waits for the deletion under way, which
  stops after the keys it has just asked for. What is found from then on, stays.
* A flight that fails, or whose driver dies, leaves it so: its objects are in the store, and a later flight of the same
  capture may count on them (the trainer answers a repeated upload from memory, and a dead trainer's publisher process
  may be writing still). Only a recorded publication ends that, because a trainer has one capture and one upload at a
  time: when a step is recorded, the next upload has not begun. A publication that is recorded late, when the next
  flight has begun, ends nothing.
* Results of older drivers and incarnations are refused, so a new incarnation starts with nothing under way; a trainer
  that outlived the old one looks at every object again when it uploads for the new one.
* What is deleted is needed by no checkpoint that the ledger has, so never by the newest one, whose objects the next
  publication refers to.
* A manager that was stopped in the middle of a deletion and goes on after its successor has begun looks at the journal
  before each call, and gives up when it was fenced. The one call that may be on its way still is why the successor
  records no checkpoint that rests on an object which its predecessor was deleting, nor one on an object whose deletion
  the store has not answered (`storage.retention.check_lasting`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from gpu.rollout.messages import Caller
from gpu.rollout.signal import wait_event
from storage.clock import Clock
from storage.errors import StoreError
from storage.filesystem import Store
from storage.garbage import Item, orphan_objects
from storage.journal import read_segment
from storage.retention import BATCH, UNREADABLE, Deletion, Doomed, Retention, check_lasting
from storage.runs import RunPaths
from storage.schema import CheckpointPublished

if TYPE_CHECKING:
    from gpu.rollout.manager import RolloutManager

log = logging.getLogger(__name__)


class Collected(NamedTuple):
    """Objects that were found, the keys of those that could not be deleted, and why there may be more."""

    found: list[Item]
    failed: list[str]
    skipped: str


class Retaining:
    """One manager's. `problem` says why something that was retired is still there; the next publication's deletion
    tries again. Nothing waits for it but the next publication and the end of the run."""

    def __init__(self, manager: RolloutManager, store: Store, retention: Retention, clock: Clock) -> None:
        self._manager, self._store, self._retention, self._clock = manager, store, retention, clock
        ledger = manager.control.ledger
        self._inherited = {one.manifest: one for one in ledger.retired}
        """Retired checkpoints that an older incarnation may still be deleting."""
        self._endangered: set[str] = set()
        """Digests of objects that an older incarnation, or a request without an answer, may still be deleting."""
        self._listed = retention.payload == "keep"
        self._wanted = bool(Doomed.of(ledger)) or not self._listed
        self._quiet, self._working = True, False
        self._stop = threading.Event()
        self.flight = 0
        self.problem = ""

    # ------------------------------------------------------------------ publications

    async def begin(self, caller: Caller) -> None:
        """A publication begins: nothing is deleted until one was recorded. Waits for the deletion under way. Raises
        `RunFenced`."""
        manager = self._manager
        manager.callers.check(caller)
        self.flight += 1
        self._quiet = False
        self._stop.set()
        while self._working:
            event = manager.changed.current()
            await wait_event(event, 1.0)
            manager.callers.check(caller)

    async def check(self, manifest: str, digest: str) -> None:
        """Raises `CheckpointRefused`, see `storage.retention.check_lasting`."""
        if not self._endangered and not self._inherited:
            return
        needed = Doomed.of(self._manager.control.ledger).needed
        dying, endangered = list(self._inherited.values()), set(self._endangered)
        run = self._manager.info.run
        await asyncio.to_thread(check_lasting, self._store, run, (manifest, digest), endangered, dying, needed)

    def published(self, flight: int) -> None:
        """The publication `flight` is durable, and so is what its record retired."""
        if flight == self.flight:
            self._quiet = True
        self._wanted = bool(Doomed.of(self._manager.control.ledger)) or not self._listed
        self._manager.changed.notify()

    async def settled(self) -> None:
        """Wait until what can be deleted now is. Raises the manager's fatal error."""
        manager = self._manager
        while self._working or (self._wanted and self._quiet):
            event = manager.changed.current()
            manager.callers.alive()
            await wait_event(event, 1.0)

    # ------------------------------------------------------------------ deletion

    async def run(self) -> None:
        """Delete when it is wanted and allowed, until the run ends."""
        manager = self._manager
        while not manager.control.ledger.finished and manager.callers.fatal is None:
            event = manager.changed.current()
            if self._working or not (self._wanted and self._quiet):
                await wait_event(event, None)
                continue
            self._wanted, self._working = False, True
            try:
                await self._round()
            finally:
                self._stop.set()  # a thread cannot be cancelled
                self._working = False
                manager.changed.notify()

    async def _round(self) -> None:
        manager = self._manager
        self._stop = stop = threading.Event()
        ledger = manager.control.ledger
        go = Deletion(
            self._store, manager.info.run, Doomed.of(ledger), self._retention, self._clock,
            lambda: not stop.is_set() and not self._fenced(),
        )  # fmt: skip
        try:
            await self._find_spent()
            await asyncio.to_thread(go.run)
            self.problem = go.problem
        except Exception as error:  # noqa: BLE001 - whatever keeps something from being deleted, the run goes on
            self.problem = str(error)
        if self.problem:
            log.error("op=retain run=%s decision=again_later reason=%s", manager.info.run, self.problem)
        self._remember(go)
        if (gone := go.deleted) is not None and not ledger.finished and manager.callers.fatal is None:
            manager.control.books.record(gone)
            manager.appended()

    def _remember(self, go: Deletion) -> None:
        self._endangered |= {key.rpartition("/")[2] for key in go.unsure}
        for manifest in self._inherited.keys() & go.objects.keys():
            self._endangered |= go.objects[manifest]
            del self._inherited[manifest]

    def _fenced(self) -> bool:
        """Whether somebody newer has claimed the run. In a thread."""
        slot = self._manager.control.books.journal.slot
        while (segment := read_segment(self._store, self._manager.info.run, slot)) is not None:
            if segment.header.incarnation > self._manager.incarnation:
                return True
            slot += 1
        return False

    async def collect(self, delete: bool) -> Collected:
        """Objects that no checkpoint needs, retired ones included: what killed publications left. They are deleted, if
        asked for, under the rule of the module; see `storage.garbage`."""
        manager = self._manager
        if not self._quiet or self._working:
            return Collected([], [], "a checkpoint is being published or deleted: try again after the next one")
        ledger = manager.control.ledger
        living = [*ledger.kept, *ledger.checkpoints, *ledger.retired]
        self._working, self._stop = True, threading.Event()
        try:
            return await asyncio.to_thread(self._collect, living, delete, self._stop)
        finally:
            self._stop.set()
            self._working = False
            manager.changed.notify()

    def _collect(self, living: list[CheckpointPublished], delete: bool, stop: threading.Event) -> Collected:
        try:
            found = orphan_objects(self._store, self._manager.info.run, living)
        except UNREADABLE as error:
            return Collected([], [], f"a checkpoint cannot be read: {error}")
        failed: list[str] = []
        for at in range(0, len(found) if delete else 0, BATCH):
            keys = [item.key for item in found[at : at + BATCH]]
            if stop.is_set() or self._fenced():
                return Collected(found[:at], failed, "a checkpoint is being published: try again after it")
            try:
                failed += self._store.delete(keys)
            except StoreError:
                self._endangered |= {key.rpartition("/")[2] for key in keys}
                raise
        return Collected(found, failed, "")

    async def _find_spent(self) -> None:
        """Payload files of older incarnations that nothing needs: those that were deleted from no list, because nobody
        noted them or whoever did has died. Only a manager of their own incarnation would still record one."""
        if self._listed:
            return
        manager, run = self._manager, self._manager.info.run
        keys = await asyncio.to_thread(self._store.list, RunPaths(run).payload)
        names = [key.rpartition("/")[2].removesuffix(".arrow") for key in keys]
        spent = manager.control.ledger.spent_files
        assert spent is not None, "somebody deletes them"
        for name in names:
            made_by = name.partition("-")[0]
            if made_by.isdigit() and int(made_by) < manager.incarnation and name not in manager.control.ledger.blocks:
                spent.setdefault(name)
        self._listed = True
