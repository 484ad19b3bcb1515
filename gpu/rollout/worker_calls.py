"""The manager's calls for its workers, and for whoever looks after workers and engines. Part of `RolloutManager`."""

from __future__ import annotations

from gpu.rollout.messages import Accepted, Acked, Caller, Report, Work
from gpu.rollout.parts import ManagerParts
from gpu.rollout.signal import wait_event
from storage.errors import RunFenced


class WorkerCalls(ManagerParts):
    """What workers ask and report."""

    async def take(self, incarnation: int, worker: str, limit: int, timeout: float) -> Work:
        """Up to `limit` attempts; waits up to `timeout` seconds for the first."""
        deadline = self._clock.monotonic() + timeout
        while True:
            event = self.changed.current()
            self.callers.check(Caller(incarnation))
            if worker in self._lost_workers:
                raise RunFenced(
                    f"worker {worker} was given up",
                    expected="a living worker",
                    action="stop; another one has its attempts",
                )
            taken = self.control.take(worker, limit) if self.engines.names else []
            acks = self.control.results.acknowledging.take()
            left = deadline - self._clock.monotonic()
            if taken or acks or left <= 0:
                self.committer.appended()
                return Work(taken, self.engines.names, acks)
            await wait_event(event, left)

    async def report(self, incarnation: int, report: Report) -> Accepted:
        """Finished turns and ended attempts. Returns before they are durable; groups enter the buffer when they are."""
        self.callers.check(Caller(incarnation))
        accepted = self.control.report(report)
        self.committer.appended()
        self.changed.notify()
        return accepted

    async def acknowledged(self, incarnation: int, acked: Acked) -> None:
        """A worker delivered acknowledgements to a host, or could not."""
        self.callers.check(Caller(incarnation))
        self.control.results.acknowledging.answer(acked)
        self.committer.appended()
        self.changed.notify()

    async def settled(self, incarnation: int, seq: int) -> None:
        """Returns when record `seq` is durable: what a worker waits for before it changes anything outside. Raises
        `DeadlineExceeded`; the call may be repeated."""
        self.callers.check(Caller(incarnation))
        await self._durable(seq, "the intent of a request")

    def lose_worker(self, worker: str) -> int:
        """A worker process is gone; returns how many attempts it had. A call of it that still waits gets nothing: work
        handed to a dead worker would be nobody's."""
        self._lost_workers.add(worker)
        lost = self.control.lose_worker(worker)
        self.committer.appended()
        self.changed.notify()
        return lost

    def serve(self, number: int | None) -> None:
        """Every serving engine has confirmed version `number` (None: none serves)."""
        self.control.serve(number)
        self.changed.notify()
