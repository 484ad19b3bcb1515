"""The manager's calls about evaluations. Part of `RolloutManager`; a driver calls them like its others."""

from __future__ import annotations

import msgspec

from gpu.rollout.messages import Caller, Wait
from gpu.rollout.parts import ManagerParts
from gpu.rollout.signal import wait_event
from storage.schema import EvaluationDone


class Evaluated(msgspec.Struct, frozen=True):
    """What runs, which of it an activation would make mixed, and the newest result of each suite."""

    running: tuple[str, ...]
    delaying: tuple[str, ...]
    newest: dict[str, EvaluationDone]


class EvaluationCalls(ManagerParts):
    """What a driver asks about evaluations."""

    async def evaluate(self, caller: Caller, step: int) -> int:
        """The weights after `step`, the last committed one, are to be evaluated; returns when that is durable. Nothing
        waits for the results. May be repeated. Returns how many suites began."""
        with self.callers.call(caller):
            begun = self.control.evaluations.due(step)
            self.changed.notify()
            await self._durable(self.control.books.journal.last_seq, f"that step {step} is to be evaluated")
            return begun

    async def evaluated(self, caller: Caller, version: int | None) -> Evaluated:
        """How evaluations stand before version `version` is activated, or at the end of the run (None)."""
        self.callers.check(caller)
        evaluations = self.control.evaluations
        running, delaying = evaluations.delaying(None), evaluations.delaying(version)
        return Evaluated(tuple(running), tuple(delaying), dict(evaluations.newest))

    async def await_evaluations(self, caller: Caller, version: int | None, deadline_s: float) -> Evaluated:
        """Wait until activating `version` makes no evaluation mixed (None: until none runs), or for `deadline_s`."""
        deadline = self._clock.monotonic() + deadline_s
        with self.callers.call(caller):
            try:
                while True:
                    event = self.changed.current()
                    found = await self.evaluated(caller, version)
                    left = deadline - self._clock.monotonic()
                    if not found.delaying or left <= 0:
                        return found
                    names = ", ".join(found.delaying[:3])
                    self.waits.note("driver", Wait(f"the evaluation of {names}", "workers", "evaluation", "workers"))
                    await wait_event(event, min(left, 1.0))
            finally:
                self.waits.note("driver", None)
