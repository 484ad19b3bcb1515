"""The manager's calls that anybody may make, beside any driver: looking, and what only a person can decide."""

from __future__ import annotations

from gpu.rollout.figures import figures
from gpu.rollout.parts import ManagerParts
from gpu.rollout.retaining import Collected
from storage.errors import TidegateError


class PeopleCalls(ManagerParts):
    """What anybody may ask."""

    async def quarantined(self) -> dict[int, str]:
        """Groups that spent their attempt budget, and why."""
        return self.control.quarantined()

    async def release_quarantined(self, ordinals: list[int]) -> None:
        """Give groups another budget; returns when that is durable. Raises `QuarantineRefused`, having released none.
        No driver's call: a person may make it beside any driver."""
        self.callers.alive()
        await self._durable(self.control.release_quarantined(ordinals), "the release")

    async def discard_continuations(self, rollouts: list[tuple[int, int]], reason: str) -> int:
        """Unfinished rollouts start over; returns how many had durable turns, when that is durable. Raises
        `ContinuationInvalid`, having discarded none."""
        self.callers.alive()
        count = self.control.results.discard_continuations(rollouts, reason)
        await self._durable(self.control.books.journal.last_seq, "the discarded turns")
        return count

    async def host_gone(self, host: str, boot: str, reason: str) -> None:
        """A person says that this process of a host is gone for good: what is owed to it expires. Raises
        `AckMismatch` when nothing is."""
        self.callers.alive()
        await self._durable(self.control.results.acknowledging.expire(host, boot, reason), "what is owed to the host")

    async def collect_objects(self, delete: bool) -> Collected:
        """Objects that no checkpoint needs; deletes them when asked to and no publication is under way."""
        self.callers.alive()
        return await self.retaining.collect(delete)

    async def metrics(self) -> dict[str, float]:
        """Rollout control's figures now; see `gpu.rollout.figures`."""
        return figures(self.control, self.waits)

    async def condition(self) -> TidegateError | None:
        """The fatal error that ended this incarnation, if it has ended."""
        return self.callers.fatal

    async def status(self) -> dict[str, object]:
        """What every component waits for, since when, and who can satisfy it."""
        journal = self.control.books.journal
        circle = self.watchdog.look()
        return {
            **self.control.status(),
            "run": self.info.run,
            "waits": self.waits.status(),
            "circle": circle,
            "driver": self.callers.owner,
            "driver_place": self.callers.place,
            "driver_token": self.callers.token,
            "engines": self.engines.status(),
            "journal": {
                "slot": journal.slot,
                "durable_seq": journal.durable_seq,
                "last_seq": journal.last_seq,
                "undurable_age_s": journal.undurable_age(),
                "stalled": self.committer.waits_for,
                "since_snapshot": self.archiving.lag,
                "snapshot_problem": self.archiving.problem,
            },
            "retention": {
                "kept": [one.step for one in self.control.ledger.kept],
                "retired": [one.step for one in self.control.ledger.retired],
                "problem": self.retaining.problem,
            },
            "fatal": str(self.callers.fatal or ""),
        }
