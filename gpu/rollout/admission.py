"""Admission holds: who keeps reservations and leases closed, and why nothing is admitted right now.

Holds are independent; admission reopens at the release of the last one. Close dominates: after it, releases are
accepted as no-ops and never reopen. A hold that its owner stops renewing expires on the monotonic clock. Holds are
memory, never journaled: they die with the incarnation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.rollout.messages import Hold, Identity
from storage.clock import Clock
from storage.errors import HoldRefused


@dataclass(slots=True)
class _Held:
    hold: Hold
    token: int
    expires: float
    ttl_s: float
    since: float
    open: set[Identity]


class Admission:
    """The holds of one incarnation. `epoch` moves at each acquire and at each reopening."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._next = 1
        self.epoch = 0
        self.closed = ""
        self.held_seconds: dict[str, float] = {}

    @property
    def is_open(self) -> bool:
        return not self._held and not self.closed

    def why_closed(self) -> str:
        """The reason for people; empty when admission is open."""
        if self.closed:
            return f"closed: {self.closed}"
        return "; ".join(
            f"hold {held.hold.hold} of {held.hold.owner} for {held.hold.purpose} since {self._age(held):.1f} s"
            for held in self._held.values()
        )

    def _age(self, held: _Held) -> float:
        return self._clock.monotonic() - held.since

    def acquire(self, owner: str, purpose: str, token: int, ttl_s: float, active: set[Identity]) -> Hold:
        """Close admission, then remember what is executing: the terminal frontier."""
        self.epoch += 1
        now = self._clock.monotonic()
        hold = Hold(self._next, self.epoch, owner, purpose, len(active))
        self._held[hold.hold] = _Held(hold, token, now + ttl_s, ttl_s, now, active)
        self._next += 1
        return hold

    def renew(self, hold: int, epoch: int) -> None:
        held = self.confirm(hold, epoch)
        held.expires = self._clock.monotonic() + held.ttl_s

    def confirm(self, hold: int, epoch: int) -> _Held:
        """The hold an effect relies on is up right now. Raises `HoldRefused`."""
        held = self._held.get(hold)
        if held is None or held.hold.epoch != epoch or held.expires <= self._clock.monotonic() or self.closed:
            raise HoldRefused(
                f"hold {hold} of epoch {epoch} is not up ({self.closed or 'expired, released or voided'})",
                expected="a live hold at the moment of the effect",
                action="acquire a hold again and repeat the operation",
            )
        return held

    def release(self, hold: int) -> bool:
        """Idempotent. True when this release reopened admission."""
        held = self._held.pop(hold, None)
        if held is None:
            return False
        owner = held.hold.owner
        self.held_seconds[owner] = self.held_seconds.get(owner, 0.0) + self._age(held)
        return self._reopened()

    def release_token(self, token: int) -> list[int]:
        """Release every hold of one driver; returns them."""
        mine = [hold for hold, held in self._held.items() if held.token == token]
        for hold in mine:
            self.release(hold)
        return mine

    def late(self) -> list[Hold]:
        """Holds whose owner stopped renewing. Whoever wraps this ends what runs under them, then releases them."""
        now = self._clock.monotonic()
        return [held.hold for held in self._held.values() if held.expires <= now]

    def _reopened(self) -> bool:
        if self.is_open:
            self.epoch += 1
            return True
        return False

    def ended(self, identities: Sequence[Identity]) -> None:
        """Executions ended: their results are published to the buffer, or their attempts are abandoned."""
        for held in self._held.values():
            held.open.difference_update(identities)

    def num_open(self, hold: int) -> int:
        """Executions of the hold's frontier that have not ended. Waiting on it neither cancels nor consumes."""
        held = self._held.get(hold)
        return len(held.open) if held else 0

    def still_open(self, hold: int) -> tuple[Identity, ...]:
        """Which ones, in order."""
        held = self._held.get(hold)
        return tuple(sorted(held.open, key=str)) if held else ()

    def close(self, reason: str) -> None:
        """For good. Repeatable; the first reason stays."""
        self.closed = self.closed or reason

    def status(self) -> list[dict[str, object]]:
        return [
            {
                "hold": h.hold.hold,
                "owner": h.hold.owner,
                "purpose": h.hold.purpose,
                "age_s": self._age(h),
                "expires_in_s": h.expires - self._clock.monotonic(),
                "waits_for": len(h.open),
            }
            for h in self._held.values()
        ]
