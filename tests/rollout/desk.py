"""A manager with one driver and one worker at hand, on a store that can fail and engines that can be slow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

from gpu.rollout.calls import Attached
from gpu.rollout.committer import FlushSettings
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.manager import ManagerSettings, RolloutManager, open_manager
from gpu.rollout.messages import Dispatch, Ended, Grant, Outcome, Report, Turn
from gpu.rollout.results import keep_all
from storage.archivist import Archivist
from storage.clock import SystemClock
from storage.errors import EngineFailed, StoreUnavailable
from storage.filesystem import Bytes
from storage.ledger import Policy
from storage.memory import MemoryStore
from storage.retention import Retention
from storage.runs import create_run, make_run
from storage.schema import LedgerSnapshot
from tests.rollout.building import RETENTION, RUN, limits


class Engines(EngineControl):
    """Serve a version at once; pausing lasts as long as the test wants. `keeping_back` from a pause until a resume;
    `broken` are calls that raise, each name once."""

    names = ("e",)

    def __init__(self) -> None:
        self.manager: RolloutManager | None = None
        self.paused = asyncio.Event()
        self.paused.set()
        self.cancelled = 0
        self.keeping_back = False
        self.activated: list[int] = []
        self.broken: list[str] = []

    def _try(self, call: str) -> None:
        if call in self.broken:
            self.broken.remove(call)
            raise EngineFailed(f"{call} failed", expected="engines", action="again")

    async def activate(self, policy: Policy) -> None:
        assert self.manager is not None
        self._try("activate")
        self.activated.append(policy.number)
        self.manager.serve(policy.number)
        self._try("reply of activate")

    async def pause(self) -> int:
        self.keeping_back = True
        await self.paused.wait()
        return 0

    async def resume(self) -> None:
        self._try("resume")
        self.keeping_back = False

    async def cancel(self) -> int:
        self._try("cancel")
        self.cancelled += 1
        return 3


class Outage(MemoryStore):
    """Refuses to create while `down`, and does not come back from it while `answers` is clear."""

    down = False

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def create(self, key: str, data: Bytes) -> None:
        if self.down:
            raise StoreUnavailable("no room", expected="room", action="make room")
        self.answers.wait(10.0)
        super().create(key, data)


class Desk:
    """A manager with one driver and one worker at hand."""

    def __init__(
        self,
        length: int | None = None,
        retention: Retention = RETENTION,
        store: Outage | None = None,
        **changes: object,
    ) -> None:
        self.store = store or Outage()
        self.engines = Engines()
        self.limits = limits(**changes)
        n, staleness = self.limits.num_siblings, self.limits.staleness
        info = make_run(run=RUN, created=0.0, num_siblings=n, staleness=staleness, fingerprints={}, settings={})
        create_run(self.store, info)
        settings = ManagerSettings(FlushSettings(0.01, 1 << 20, 0.05), 60.0, 0.3, 8, retention)
        self.manager = open_manager(
            self.store, info, self.limits, SystemClock(), settings, owner="first", reason="start", length=length,
            group_filter=keep_all,
        )  # fmt: skip
        self.engines.manager, self.manager.engines = self.manager, self.engines
        self.archivist = Archivist(self.store, RUN, n)
        self.manager.archive = lambda slot: self.archive(slot)
        self.blocks = 0

    async def archive(self, slot: int) -> LedgerSnapshot:
        return await asyncio.to_thread(self.archivist.snapshot, slot)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Desk]:
        """From the first update to the end of the manager."""
        await self.open()
        try:
            yield self
        finally:
            self.engines.paused.set()
            self.store.answers.set()
            await self.manager.stop()

    async def open(self) -> None:
        self.manager.start()
        self.caller = (await self.attach("flow")).caller
        await self.update(0)

    async def lease(self, seconds: float = 1.0) -> Grant:
        grant = await self.manager.lease(self.caller, seconds)
        assert grant is not None
        return grant

    async def commit(self, grant: Grant) -> None:
        step = grant.lease.step
        await self.manager.commit(self.caller, grant.lease.lease, step, f"state-{step}", f"weights-{step}", {})

    async def attach(self, owner: str, take_over: bool = False) -> Attached:
        return await self.manager.attach(owner, take_over, "here:1")

    async def update(self, step: int) -> None:
        hold = await self.manager.acquire(self.caller, "update", 60.0)
        await self.manager.publish_policy(self.caller, f"weights-{step}")
        await self.manager.activate(self.caller, hold)
        await self.manager.release(self.caller, hold.hold)

    async def take(self, count: int = 100, worker: str = "w", timeout: float = 1.0) -> list[Dispatch]:
        return (await self.manager.take(self.manager.incarnation, worker, count, timeout)).dispatches

    async def turn(self, dispatch: Dispatch) -> None:
        """The first turn of an attempt."""
        self.blocks += 1
        turn = Turn(dispatch.identity, dispatch.boundary, 0, 0, 0, 0, 2, dispatch.version, b"state")
        report = Report("w", f"b{self.blocks}", "0" * 64, 0, None, (turn,), ())
        await self.manager.report(self.manager.incarnation, report)

    async def finish(self, dispatches: list[Dispatch], outcome: Outcome = Outcome.SEALED) -> None:
        self.blocks += 1
        ended = tuple(Ended(d.identity, outcome, row, 1, d.version, 1.0) for row, d in enumerate(dispatches))
        report = Report("w", f"b{self.blocks}" if ended else "", "0" * 64, 0, None, (), ended)
        await self.manager.report(self.manager.incarnation, report)


async def soon() -> None:
    """Long enough for whatever happens by itself."""
    await asyncio.sleep(0.03)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come by itself."""
    async with asyncio.timeout(10.0):
        while not condition():
            await soon()
