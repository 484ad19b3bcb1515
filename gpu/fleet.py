"""Keeps engines and workers alive within an incarnation, and brings policy versions to the engines.

An engine serves only while it has confirmed the newest version; one that dies, or fails an update, is replaced and gets
the version before it gets traffic. A worker that dies gives its attempts back and is replaced. Whoever starts processes
is a `Launcher`: Ray in a cluster, plain objects in tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpu.generation.engine import Version
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.manager import RolloutManager
from gpu.rollout.signal import Signal, seen, wait_event
from storage.errors import (
    ActorLost,
    DeadlineExceeded,
    LineageInvalid,
    TidegateError,
    UserError,
    WeightsUnavailable,
)
from storage.ledger import Policy

log = logging.getLogger(__name__)


class FleetEngine(Protocol):
    """The calls of an engine server that the fleet makes. `weights` is whatever the trainer hands out."""

    async def update(self, version: Version, weights: object) -> Version: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def cancel(self) -> int: ...

    async def forget(self, client: str) -> int: ...

    async def run(self) -> None: ...


class FleetWorker(Protocol):
    async def run(self) -> None: ...


class Launcher(Protocol):
    """Starts processes; returns when they answer. Raises `UserError` for what can never be placed."""

    async def engine(self, name: str) -> FleetEngine: ...

    async def worker(self, name: str) -> FleetWorker: ...

    async def stop(self, name: str) -> None:
        """End a process, whether it lives or not."""
        ...


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`activate_s` bounds an activation; `restart_s` is the pause before a failed process is started again, doubling up
    to ten times; after `max_failures` starts in a row that fail, the incarnation ends."""

    num_engines: int
    num_workers: int
    activate_s: float
    restart_s: float
    max_failures: int


@dataclass(slots=True)
class _Member:
    """One place of the fleet and the process that fills it now."""

    kind: str
    index: int
    generation: int = 0
    failures: int = 0
    state: str = "starting"
    engine: FleetEngine | None = None
    confirmed: Version | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def name(self, incarnation: int) -> str:
        return f"{self.kind}-{incarnation}-{self.index}-{self.generation}"


class Fleet(EngineControl):
    """`weights` gives the frozen weights of a version's digest. Make it beside a manager, then `start`."""

    def __init__(
        self,
        manager: RolloutManager,
        launcher: Launcher,
        weights: Callable[[str], Awaitable[object]],
        settings: FleetSettings,
    ) -> None:
        self._manager, self._launcher, self._weights, self._settings = manager, launcher, weights, settings
        self._engines = [_Member("engine", index) for index in range(settings.num_engines)]
        self._workers = [_Member("worker", index) for index in range(settings.num_workers)]
        self._policy: Policy | None = None
        self._changed = Signal()
        self._keepers: list[asyncio.Task[None]] = []
        self.replaced = 0
        manager.engines = self

    def start(self) -> None:
        keepers = [self._keep(member, self._live_engine) for member in self._engines]
        keepers += [self._keep(member, self._live_worker) for member in self._workers]
        self._keepers = [asyncio.create_task(keeper) for keeper in keepers]

    def kill(self) -> None:
        """Stop keeping; the processes are somebody else's now."""
        for keeper in self._keepers:
            keeper.cancel()

    async def stop(self) -> None:
        """End every process of the fleet."""
        self.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        names = [member.name(self._manager.incarnation) for member in [*self._engines, *self._workers]]
        await asyncio.gather(*(self._launcher.stop(name) for name in names), return_exceptions=True)

    # ------------------------------------------------------------------ lives

    async def _keep(self, member: _Member, live: Callable[[_Member, str], Awaitable[None]]) -> None:
        """Fill one place for ever: start, live, clean up, start the next."""
        while True:
            name = member.name(self._manager.incarnation)
            try:
                await live(member, name)
            except UserError as error:
                self._manager.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - any end of a process is a reason to replace it
                member.failures += 1
                member.state = f"ended: {error}"
                log.warning("op=fleet member=%s decision=replace reason=%s", name, error)
            self.replaced += 1
            await self._launcher.stop(name)
            if member.failures >= self._settings.max_failures:
                self._manager.fail(
                    ActorLost(
                        f"{name} failed {member.failures} times in a row; last: {member.state}",
                        expected="a process that starts",
                        action="mend the cause, then retry the flow run",
                    )
                )
                return
            await asyncio.sleep(self._settings.restart_s * min(10, 2 ** max(0, member.failures - 1)))
            member.generation += 1

    async def _live_engine(self, member: _Member, name: str) -> None:
        member.state = "starting"
        member.engine = engine = await self._launcher.engine(name)
        alive = asyncio.ensure_future(engine.run())
        alive.add_done_callback(seen)
        try:
            member.state = "waits for weights"
            await self._until(alive, self._bring_current(member))
            member.failures = 0
            await alive
        finally:
            alive.cancel()
            member.engine = member.confirmed = None
            self._serve()

    async def _until(self, alive: asyncio.Future[None], work: Awaitable[None]) -> None:
        """Do `work` as long as the process lives."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(seen)
        await asyncio.wait([alive, task], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await alive
        await task

    async def _live_worker(self, member: _Member, name: str) -> None:
        member.state = "starting"
        worker = await self._launcher.worker(name)
        member.state, member.failures = "working", 0
        try:
            await worker.run()
        finally:
            self._manager.lose_worker(name)
            await asyncio.gather(
                *(other.engine.forget(name) for other in self._engines if other.engine), return_exceptions=True
            )

    # ------------------------------------------------------------------ versions

    async def _bring_current(self, member: _Member) -> None:
        """Bring the newest version to an engine, waiting for weights as long as there are none."""
        while True:
            event = self._changed.current()
            if self._policy is not None:
                try:
                    await self._bring(member)
                    return
                except WeightsUnavailable as error:
                    member.state = f"waits for weights: {error}"
            await wait_event(event, 1.0)

    async def _bring(self, member: _Member) -> None:
        """One engine, the newest version; again when it moved meanwhile."""
        async with member.lock:
            while self._policy is not None and member.engine is not None:
                policy = self._policy
                version = Version(policy.incarnation, policy.number, policy.digest)
                if member.confirmed == version:
                    return
                weights = await self._fetch(policy.digest)
                member.confirmed = await member.engine.update(version, weights)
                member.state = "serving"
                self._serve()

    async def _fetch(self, digest: str) -> object:
        try:
            return await self._weights(digest)
        except (ActorLost, LineageInvalid) as error:
            raise WeightsUnavailable(
                f"no weights {digest[:12]}: {error}",
                expected="a trainer that holds the published version",
                action="retry the flow run; it restores the trainer and publishes again",
            ) from error

    def _serve(self) -> None:
        """Tell the manager which engines have confirmed the newest version."""
        if self._policy is None:
            return
        version = Version(self._policy.incarnation, self._policy.number, self._policy.digest)
        serving = [member for member in self._engines if member.confirmed == version]
        self.names = tuple(member.name(self._manager.incarnation) for member in serving)
        self._manager.serve(self._policy.number if serving else None)
        self._changed.notify()

    async def activate(self, policy: Policy) -> None:
        """Rolls forward: engines that fail are replaced and catch up; returns when one serves this version and none
        serves another. Raises `WeightsUnavailable`, and `DeadlineExceeded` when none serves in time."""
        self._policy = policy
        self._serve()
        live = [member for member in self._engines if member.engine is not None]
        outcomes = await asyncio.gather(*(self._bring(member) for member in live), return_exceptions=True)
        for member, outcome in zip(live, outcomes, strict=True):
            if isinstance(outcome, WeightsUnavailable):
                raise outcome
            if isinstance(outcome, TidegateError) and not isinstance(outcome, ActorLost):
                log.warning(
                    "op=activate member=%s decision=replace reason=%s", member.name(policy.incarnation), outcome
                )
                await self._launcher.stop(member.name(self._manager.incarnation))
        await self._wait_serving(policy)

    async def _wait_serving(self, policy: Policy) -> None:
        try:
            async with asyncio.timeout(self._settings.activate_s):
                while self._policy == policy and not self.names:
                    event = self._changed.current()
                    self._manager.callers.alive()
                    await wait_event(event, 1.0)
        except TimeoutError as error:
            states = "; ".join(f"{member.kind} {member.index}: {member.state}" for member in self._engines)
            raise DeadlineExceeded(
                f"no engine serves version {policy.number} after {self._settings.activate_s:.0f} s ({states})",
                expected="one serving engine",
                action="look at the engines' logs; activation goes on by itself",
                code="activate",
            ) from error

    # ------------------------------------------------------------------ drains

    async def pause(self) -> int:
        await asyncio.gather(
            *(member.engine.pause() for member in self._engines if member.engine), return_exceptions=True
        )
        return 0

    async def resume(self) -> None:
        await asyncio.gather(
            *(member.engine.resume() for member in self._engines if member.engine), return_exceptions=True
        )

    async def cancel(self) -> int:
        ended = await asyncio.gather(
            *(member.engine.cancel() for member in self._engines if member.engine), return_exceptions=True
        )
        return sum(count for count in ended if isinstance(count, int))

    def status(self) -> dict[str, object]:
        return {
            "serving": list(self.names), "replaced": self.replaced,
            "members": {m.name(self._manager.incarnation): m.state for m in [*self._engines, *self._workers]},
        }  # fmt: skip
