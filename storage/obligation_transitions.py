"""Transitions of acknowledgements that are owed to hosts for completed results. See `storage.transitions`.

sealed, with a receipt ──► owed ──ack_done──► released by its host
                            └──obligation_expired──► nobody is there to release it
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from storage import schema
from storage.errors import AckMismatch
from storage.ledger import Ledger, Obligation
from storage.schema import Record

ALTERED = "the journal was altered; `tidegate fork RUN NEW --last-good`"
_HEX = re.compile(r"[0-9a-f]{64}")
_CAPTURE = re.compile(r"(?:.*/)?g(\d+)/(\d+)~(\d+)")


def check_receipts(ledger: Ledger, seq: int, record: schema.Sealed) -> None:
    """Each receipt is whole, of an attempt that the record seals, the only one of its host. Raises `AckMismatch`."""
    seen: set[tuple[int, str]] = set()
    for one in record.receipts:
        if not 0 <= one.place < len(record.groups):
            raise _mismatch(record, seq, f"a receipt for place {one.place}", f"one of {len(record.groups)} rollouts")
        if (one.place, one.host) in seen:
            raise _mismatch(record, seq, f"two receipts of {one.host} for one rollout", "one")
        seen.add((one.place, one.host))
        if not (one.host and one.boot and one.result and _HEX.fullmatch(one.digest)) or one.generation < 1:
            raise _mismatch(record, seq, f"the receipt {one}", "host, boot, result, sha256, a generation from 1")
        if (one.capture is None) != (one.call is None):
            raise _mismatch(
                record, seq, f"half a lineage: capture {one.capture!r}, call {one.call!r}", "both, or neither"
            )
        if one.capture is not None:
            _check_capture(record, seq, one, one.capture)


def _check_capture(record: schema.Sealed, seq: int, one: schema.Receipt, capture: str) -> None:
    """The key of captured tokens is the rollout's own, of this attempt or of one before it."""
    group, sibling, attempt = record.groups[one.place], record.siblings[one.place], record.attempts[one.place]
    found = _CAPTURE.fullmatch(capture)
    if found is None or tuple(map(int, found.groups()[:2])) != (group, sibling) or int(found[3]) > attempt:
        expected = f"one of rollout g{group}/{sibling}, up to attempt {attempt}"
        raise _mismatch(record, seq, f"a receipt with capture key {capture!r}", expected, "capture")


def owe(ledger: Ledger, record: schema.Sealed) -> None:
    for one in record.receipts:
        where = record.groups[one.place], record.siblings[one.place], record.attempts[one.place]
        incarnation = ledger.groups[where[0]].rollouts[where[1]].incarnation
        ledger.obligations[(*where, one.host)] = Obligation(*where, incarnation, one)


def ack_done(ledger: Ledger, seq: int, record: schema.AckDone) -> None:
    if not record.groups or not len(record.groups) == len(record.siblings) == len(record.attempts):
        raise _mismatch(record, seq, "columns of different lengths", "one sibling and one attempt per group")
    keys = [(*where, record.host) for where in zip(record.groups, record.siblings, record.attempts, strict=True)]
    for key in keys:
        owed = ledger.obligations.get(key)
        if owed is None or owed.receipt.boot != record.boot:
            found = f"an acknowledgement of {key[0]}/{key[1]}~{key[2]} to {record.host} ({record.boot})"
            raise _mismatch(record, seq, found, f"one that is owed: {owed.receipt.boot if owed else 'none is'}")
    if len(set(keys)) != len(keys):
        raise _mismatch(record, seq, "an acknowledgement twice", "each once")
    for key in keys:
        del ledger.obligations[key]


def obligation_expired(ledger: Ledger, seq: int, record: schema.ObligationExpired) -> None:
    keys = owed_to(ledger, record.host, record.boot)
    if not keys:
        raise _mismatch(record, seq, f"nothing is owed to {record.host} ({record.boot})", "an obligation")
    for key in keys:
        del ledger.obligations[key]
    ledger.counts["obligations_expired"] += len(keys)


def owed_to(ledger: Ledger, host: str, boot: str) -> list[tuple[int, int, int, str]]:
    """Keys of what is owed to one process of a host."""
    owed: Iterable[Obligation] = ledger.obligations.values()
    return [
        (one.group, one.sibling, one.attempt, host)
        for one in owed
        if (one.receipt.host, one.receipt.boot) == (host, boot)
    ]


def _mismatch(record: Record, seq: int, found: str, expected: str, code: str = "") -> AckMismatch:
    return AckMismatch(
        f"record {seq} ({schema.KIND_OF[type(record)]}): {found}", expected=expected, action=ALTERED, code=code
    )
