"""Makes the journal durable: one create in flight, everything that arrived meanwhile in the next.

A create whose outcome is unknown is repeated with the same bytes until it is known; meanwhile nothing else is written
and waiters say why they wait. Being fenced, or any other refusal, is fatal for the incarnation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from gpu.rollout.control import RolloutControl
from gpu.rollout.signal import Signal, wait_event
from storage.errors import CommitUnknown, StoreUnavailable
from storage.filesystem import Store
from storage.journal import Frozen, store_frozen


@dataclass(frozen=True, slots=True)
class FlushSettings:
    """When a segment is cut without a waiter: after `interval_s` or at `max_bytes`. Retries back off up to
    `max_backoff_s`."""

    interval_s: float
    max_bytes: int
    max_backoff_s: float


class Committer:
    """`changed` is notified after each segment. `run` ends only with the error that ends the incarnation."""

    def __init__(
        self,
        store: Store,
        run: str,
        control: RolloutControl,
        settings: FlushSettings,
        changed: Signal,
        dice: random.Random,
    ) -> None:
        self._store, self._run, self._control, self._settings = store, run, control, settings
        self._changed, self._dice = changed, dice
        self._journal = control.books.journal
        self._kick = Signal()
        self.stalled = ""
        self.segments = 0

    @property
    def waits_for(self) -> str:
        """Why the journal does not get on, "" while it does."""
        return self.stalled or self._store.trouble

    def appended(self) -> None:
        """Records were appended."""
        self._kick.notify()

    async def durable(self, seq: int, alive: Callable[[], None]) -> None:
        """Wait for a sequence number; `alive` raises when the wait has become pointless."""
        while self._journal.durable_seq < seq:
            changed = self._changed.current()
            alive()
            self._journal.want(seq)
            self._kick.notify()
            await wait_event(changed, 1.0)

    async def run(self) -> None:
        while True:
            kick = self._kick.current()
            if self._journal.due(self._settings.interval_s, self._settings.max_bytes):
                await self._commit(self._journal.freeze())
            else:
                await wait_event(kick, self._next_due())

    def _next_due(self) -> float | None:
        if self._journal.last_seq == self._journal.durable_seq:
            return None
        return max(0.001, self._settings.interval_s - self._journal.undurable_age())

    async def _commit(self, frozen: Frozen) -> None:
        tries = 0
        while True:
            try:
                await asyncio.to_thread(store_frozen, self._store, self._run, self._control.ledger.incarnation, frozen)
                break
            except (StoreUnavailable, CommitUnknown) as error:
                tries += 1
                self.stalled = f"slot {frozen.slot}, try {tries}: {error}"
                await asyncio.sleep(self._dice.random() * min(self._settings.max_backoff_s, 0.05 * 2.0**tries))
        self.stalled = ""
        self.segments += 1
        self._journal.confirm(frozen)
        self._control.ledger.placed(frozen.slot, frozen.last)
        self._control.durable(frozen.last)
        self._changed.notify()
