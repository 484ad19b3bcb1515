"""Waits for what an update must not cut, as the drain policy says."""

from __future__ import annotations

import asyncio

from gpu.rollout.calls import Callers
from gpu.rollout.control import RolloutControl
from gpu.rollout.drain import Drain, DrainAction, DrainPolicy
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.messages import Caller, Hold, Identity, Outcome, Wait
from gpu.rollout.signal import Signal, wait_event
from gpu.rollout.waits import Waits
from storage.clock import Clock
from storage.errors import DeadlineExceeded


class Drainer:
    """One manager's drains. Waiting neither cancels, consumes nor leases; only the policy's action at its deadline
    does."""

    def __init__(self, control: RolloutControl, callers: Callers, changed: Signal, waits: Waits, clock: Clock) -> None:
        self._control, self._callers, self._changed = control, callers, changed
        self._waits, self._clock = waits, clock

    async def drain(self, caller: Caller, hold: Hold, policy: DrainPolicy, engines: EngineControl) -> int:
        """Executions (model calls, for a boundary) that had not ended at the deadline. Raises `DeadlineExceeded` naming
        them when the policy says so."""
        if policy.mode is Drain.BOUNDARY:
            return await self._boundary(policy, engines)
        return await self._frontier(caller, hold, policy) if policy.mode is Drain.FRONTIER else 0

    async def _boundary(self, policy: DrainPolicy, engines: EngineControl) -> int:
        self._waits.note("driver", Wait("open model calls to end", "the engines", "drain"))
        try:
            async with asyncio.timeout(policy.deadline_s):
                return await engines.pause()
        except TimeoutError as error:
            if policy.action is not DrainAction.FAIL:
                return await engines.cancel() if policy.action is DrainAction.CANCEL else 1
            raise DeadlineExceeded(
                f"model calls did not end in {policy.deadline_s:.0f} s",
                expected="engines to pause",
                action="raise drain.deadline, or choose another action",
                code="drain",
            ) from error
        finally:
            self._waits.note("driver", None)

    async def _frontier(self, caller: Caller, hold: Hold, policy: DrainPolicy) -> int:
        try:
            open_ = await self._until_ended(caller, hold, self._clock.monotonic() + policy.deadline_s)
        finally:
            self._waits.note("driver", None)
        if open_ and policy.action is DrainAction.FAIL:
            raise DeadlineExceeded(
                f"{len(open_)} executions did not end in {policy.deadline_s:.0f} s: {', '.join(map(str, open_[:5]))}",
                expected="the terminal frontier to end",
                action="raise drain.deadline, or choose another mode or action",
                code="drain",
            )
        if policy.action is DrainAction.CANCEL:
            for identity in open_:
                self._control.abandon(identity, Outcome.ABORTED, f"hold {hold.hold} cancelled it")
        return len(open_)

    async def _until_ended(self, caller: Caller, hold: Hold, deadline: float) -> tuple[Identity, ...]:
        while True:
            event = self._changed.current()
            self._callers.check(caller)
            self._control.admission.confirm(hold.hold, hold.epoch)
            count = self._control.admission.num_open(hold.hold)
            left = deadline - self._clock.monotonic()
            if not count or left <= 0:
                return self._control.admission.still_open(hold.hold)
            self._waits.note("driver", Wait(f"{count} executions to end", "workers", "drain", "workers"))
            await wait_event(event, min(left, 1.0))
