"""Acknowledgements to hosts that keep completed results: who is owed what, and which worker delivers it next.

At least once, one batch under way per host process, backoff after a failure. A host is never given up because it does
not answer: what is owed ends with its acknowledgement, with another process in its place, or with a person.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.rollout.books import Books
from gpu.rollout.messages import AckBatch, Acked
from storage import schema
from storage.ledger import Obligation

BATCH = 256
GIVEN_UP_S = 120.0
"""A worker that has not answered by then is dead or hangs: another one delivers."""
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0
Where = tuple[str, str]
"""Host and boot."""


@dataclass(slots=True)
class _Delivery:
    failures: int = 0
    not_before: float = 0.0
    under_way: float | None = None
    since: float = 0.0
    problem: str = ""


class Acknowledging:
    """Decides; workers deliver."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._sealed: dict[tuple[int, int, int, str], int] = {}
        self._deliveries: dict[Where, _Delivery] = {}

    def owe(self, seq: int, record: schema.Sealed) -> None:
        """These seals brought receipts; they may be acknowledged once `seq` is durable."""
        for one in record.receipts:
            where = record.groups[one.place], record.siblings[one.place], record.attempts[one.place]
            self._sealed[(*where, one.host)] = seq

    @property
    def owed(self) -> int:
        return len(self._books.ledger.obligations)

    def take(self) -> tuple[AckBatch, ...]:
        """Batches to deliver now."""
        if not self._books.ledger.obligations:
            return ()
        now = self._books.clock.monotonic()
        found: list[AckBatch] = []
        for (host, boot), owed in self._by_process().items():
            one = self._deliveries.setdefault((host, boot), _Delivery(since=now))
            busy = one.under_way is not None and now - one.under_way < GIVEN_UP_S
            if not busy and now >= one.not_before:
                one.under_way = now
                found.append(AckBatch(host, boot, tuple(owed[:BATCH])))
        return tuple(found)

    def _by_process(self) -> dict[Where, list[Obligation]]:
        durable = self._books.journal.durable_seq
        found: dict[Where, list[Obligation]] = {}
        for key, one in self._books.ledger.obligations.items():
            if self._sealed.get(key, -1) <= durable:
                found.setdefault((one.receipt.host, one.receipt.boot), []).append(one)
        return found

    def answer(self, acked: Acked) -> None:
        """Idempotent: what is not owed any more is left alone."""
        batch = acked.batch
        where = batch.host, batch.boot
        one = self._deliveries.setdefault(where, _Delivery(since=self._books.clock.monotonic()))
        one.under_way = None
        owed = [at for at in batch.owed if self._key(at) in self._books.ledger.obligations]
        if acked.done or acked.replaced:
            self._deliveries.pop(where)
        if not owed:
            return
        if acked.done:
            columns = zip(*[(at.group, at.sibling, at.attempt) for at in owed], strict=True)
            self._books.record(schema.AckDone(batch.host, batch.boot, *map(tuple, columns)))
        elif acked.replaced:
            self._books.record(schema.ObligationExpired(batch.host, batch.boot, acked.detail or "replaced"))
        else:
            one.failures, one.problem = one.failures + 1, acked.detail
            pause = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (one.failures - 1))
            one.not_before = self._books.clock.monotonic() + pause
        self._sealed = {key: seq for key, seq in self._sealed.items() if key in self._books.ledger.obligations}

    @staticmethod
    def _key(one: Obligation) -> tuple[int, int, int, str]:
        return one.group, one.sibling, one.attempt, one.receipt.host

    def expire(self, host: str, boot: str, reason: str) -> int:
        """A person says that this process of a host is gone. Raises `AckMismatch` when nothing is owed to it."""
        return self._books.record(schema.ObligationExpired(host, boot, reason))

    def status(self) -> list[dict[str, object]]:
        """By host process: how many, for how long, and what the last failure was."""
        now = self._books.clock.monotonic()
        counted: dict[Where, int] = {}
        for one in self._books.ledger.obligations.values():
            where = one.receipt.host, one.receipt.boot
            counted[where] = counted.get(where, 0) + 1
        found: list[dict[str, object]] = []
        for (host, boot), count in counted.items():
            one = self._deliveries.get((host, boot), _Delivery(since=now))
            found.append(
                {"host": host, "boot": boot, "owed": count, "age_s": now - one.since, "failures": one.failures,
                 "problem": one.problem}
            )  # fmt: skip
        return found
