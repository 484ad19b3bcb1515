"""Transitions of acknowledgements that are owed to hosts for completed results. See `storage.transitions`.

sealed, with a receipt ──► owed ──ack_done──► released by its host
                            └──obligation_expired──► nobody is there to release it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from storage import schema
from storage.errors import AckMismatch
from storage.ledger import Ledger, Obligation
from storage.schema import Record

ALTERED = "the journal was altered; `tidegate fork RUN NEW --last-good`"
_HEX = re.compile(r"[0-9a-f]{64}")
_CAPTURE = re.compile(r"(?:.*/)?g(\d+)/(\d+)~(\d+)")


def check_receipts(ledger: Ledger, seq: int, record: schema.Sealed) -> None:
    """Each receipt is of an attempt that the record seals, and fits it. Raises `AckMismatch`."""
    by_place: dict[int, list[schema.Receipt]] = {}
    for one in record.receipts:
        if not 0 <= one.place < len(record.groups):
            raise _mismatch(record, seq, f"a receipt for place {one.place}", f"one of {len(record.groups)} rollouts")
        by_place.setdefault(one.place, []).append(one)
    for place, receipts in by_place.items():
        misfit = receipts_misfit(receipts, record.groups[place], record.siblings[place], record.attempts[place])
        if misfit is not None:
            raise _mismatch(record, seq, misfit.found, misfit.expected, misfit.code)


class Misfit(NamedTuple):
    found: str
    expected: str
    code: str = ""


def receipts_misfit(receipts: Sequence[schema.Receipt], group: int, sibling: int, attempt: int) -> Misfit | None:
    """What is wrong with the receipts of one attempt: each is whole, and the only one of its host."""
    hosts: set[str] = set()
    for one in receipts:
        if one.host in hosts:
            return Misfit(f"two receipts of {one.host} for one rollout", "one")
        hosts.add(one.host)
        if not (one.host and one.boot and one.result and _HEX.fullmatch(one.digest)) or one.generation < 1:
            return Misfit(f"the receipt {one}", "host, boot, result, sha256, a generation from 1")
        if (one.capture is None) != (one.call is None):
            return Misfit(f"half a lineage: capture {one.capture!r}, call {one.call!r}", "both, or neither")
        found = _CAPTURE.fullmatch(one.capture) if one.capture is not None else None
        if one.capture is not None and (
            found is None or tuple(map(int, found.groups()[:2])) != (group, sibling) or int(found[3]) > attempt
        ):
            expected = f"one of rollout g{group}/{sibling}, up to attempt {attempt}"
            return Misfit(f"a receipt with capture key {one.capture!r}", expected, "capture")
    return None


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
