"""Transitions of retention: what loses its meaning, and what is gone. See `storage.transitions`.

A checkpoint is one that a restore tries, then perhaps one that is kept for forks and people, then retired, then gone.
Which, only the records say: a fold knows no settings.
"""

from __future__ import annotations

from storage import schema
from storage.ledger import Ledger
from storage.rollout_transitions import illegal


def retired(ledger: Ledger, seq: int, record: schema.Retired) -> None:
    _check_retired(ledger, seq, record)
    leaving = {*record.manifests, *record.kept}
    gone = set(record.manifests)
    ledger.retired += [one for one in (*ledger.kept, *ledger.checkpoints) if one.manifest in gone]
    moved = [one for one in ledger.checkpoints if one.manifest in record.kept]
    ledger.kept = [one for one in ledger.kept if one.manifest not in gone] + moved
    left = [one for one in ledger.checkpoints if one.manifest not in leaving]
    if len(left) < len(ledger.checkpoints):
        ledger.checkpoints = left
        for number in [number for number in ledger.steps if number <= left[0].step]:
            ledger.forget_rows(ledger.steps.pop(number).lease)
    ledger.retired_blocks |= dict.fromkeys(record.blocks)


def _check_retired(ledger: Ledger, seq: int, record: schema.Retired) -> None:
    names = (*record.manifests, *record.kept)
    tried, kept = [one.manifest for one in ledger.checkpoints], {one.manifest for one in ledger.kept}
    if not (names or record.blocks) or len({*names, *record.blocks}) != len(names) + len(record.blocks):
        raise illegal(record, seq, f"{names} and blocks {record.blocks[:5]}", "at least one name, each once")
    unknown = [name for name in record.manifests if name not in tried and name not in kept]
    unknown += [name for name in record.kept if name not in tried]
    if unknown:
        raise illegal(record, seq, f"checkpoint {unknown[0]!r}", f"one of {[*kept, *tried]}, kept ones once")
    leaving = [name for name in tried if name in names]
    if leaving and (leaving != tried[: len(leaving)] or len(leaving) == len(tried)):
        raise illegal(record, seq, f"checkpoints {leaving}", f"the oldest of {tried}, never the newest")
    needed = [name for name in record.blocks if name in ledger.blocks]
    if needed:
        raise illegal(record, seq, f"block {needed[0]!r}, which is needed", "blocks that no group and no redo needs")
    again = [name for name in record.blocks if name in ledger.retired_blocks]
    if again:
        raise illegal(record, seq, f"block {again[0]!r} again", "blocks that were not retired before")


def deleted(ledger: Ledger, seq: int, record: schema.Deleted) -> None:
    names, blocks = set(record.manifests), set(record.blocks)
    strangers = names - {one.manifest for one in ledger.retired} | blocks - ledger.retired_blocks.keys()
    counts = (len(names), len(blocks)) == (len(record.manifests), len(record.blocks))
    if strangers or not counts or not (names or blocks):
        raise illegal(record, seq, f"{sorted(strangers)[:5] or 'names twice, or none'}", "what was retired, each once")
    ledger.retired = [one for one in ledger.retired if one.manifest not in names]
    for name in record.blocks:
        del ledger.retired_blocks[name]
