"""Runs whose slots yield several samples: the fold, `verify` and `inspect` know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from storage import schema
from storage.errors import ContinuationInvalid, IllegalTransition, TidegateError, TwoOwners
from storage.inspection import group_history, summary
from storage.memory import MemoryStore
from storage.payload import TurnRow, decode_block, encode_block
from storage.schema import Record
from storage.segment import Row
from storage.transitions import apply
from storage.verify import verify
from tests.simulation.world import RUN
from tests.storage.editing import finished_run, problems, rewrite
from tests.storage.test_ledger import BLOCK, CLAIM, COMPLETE, DISPATCH, RESERVE, fold, mint, seal


def turn(number: int, sample: int, sibling: int = 0) -> Record:
    return schema.TurnCommitted(0, sibling, 0, number, number, sample, "b", number, 0, 2, 0, b"")


STARTED = [CLAIM, RESERVE, mint(), BLOCK]


class TestFold:
    @pytest.mark.parametrize(
        ("before", "record", "says"),
        [
            ([], turn(0, 1), "turn 0, sample 0"),
            ([turn(0, 0)], turn(1, 2), "sample 0 or 1"),
            ([turn(0, 0), turn(1, 1)], turn(2, 0), "sample 1 or 2"),
            ([turn(0, 0), turn(1, 1)], turn(2, 3), "sample 1 or 2"),
        ],
    )
    def test_a_turn_in_another_sample_is_no_continuation(self, before: list[Record], record: Record, says: str) -> None:
        ledger, untouched = fold([*STARTED, *before]), fold([*STARTED, *before])
        with pytest.raises(ContinuationInvalid, match=says):
            apply(ledger, len(STARTED) + len(before), record)
        assert repr(ledger) == repr(untouched)

    @pytest.mark.parametrize(
        ("before", "samples", "says"),
        [
            ([], (0, 1), "0/0 with 0 samples; expected: 1 samples"),
            ([], (1, 2), "0/1 with 2 samples; expected: 1 samples"),
            ([turn(0, 0)], (3, 1), "expected: 1 or 2 samples"),
            ([turn(0, 0), turn(1, 1)], (1, 1), "expected: 2 or 3 samples"),
            ([], (1,), "equal, non-empty columns"),
        ],
    )
    def test_a_seal_of_other_samples_is_illegal(
        self, before: list[Record], samples: tuple[int, ...], says: str
    ) -> None:
        ledger, untouched = fold([*STARTED, *before]), fold([*STARTED, *before])
        with pytest.raises(IllegalTransition, match=says):
            apply(ledger, len(STARTED) + len(before), seal(samples=samples))
        assert repr(ledger) == repr(untouched)

    def test_a_restart_from_scratch_begins_with_the_first_sample_again(self) -> None:
        lost = schema.AttemptAbandoned(0, 0, 0, "worker_lost", "")
        other = schema.PayloadStored("c", "d", 3, True)
        given_up = schema.ContinuationDiscarded((0,), (0,), "restart_only")
        ledger = fold([*STARTED, turn(0, 0), turn(1, 1), lost, given_up, mint(siblings=(0,), attempt=1), other])
        apply(ledger, 10, schema.TurnCommitted(0, 0, 1, 2, 0, 0, "c", 0, 0, 2, 0, b""))
        assert ledger.groups[0].rollouts[0].boundary.sample == 0

    @pytest.mark.parametrize("siblings", [(0,), (1,), (0, 1)])
    def test_before_dispatch_a_group_has_exactly_its_slots_and_completes_with_all_of_them(self, siblings) -> None:
        """Parent identity: the slots exist from the reservation on, cannot be repeated, added to or left out."""
        ledger = fold([CLAIM, RESERVE])
        assert all(len(group.rollouts) == 2 for group in ledger.groups.values())
        assert len({id(rollout) for group in ledger.groups.values() for rollout in group.rollouts}) == 4
        dispatched = [schema.GroupsDispatched(0, 1, count, 0) for count in (1, 3)]
        for wrong in (*dispatched, *[mint(siblings=s) for s in ((0, 0), (1, 2), (-1,), ())]):
            with pytest.raises(TidegateError):
                apply(ledger, 2, wrong)
        for seq, record in enumerate((DISPATCH, BLOCK, seal(siblings=siblings)), start=2):
            apply(ledger, seq, record)
        if siblings == (0, 1):
            apply(ledger, 5, COMPLETE)
            with pytest.raises(IllegalTransition):
                apply(ledger, 6, COMPLETE)
        else:
            with pytest.raises(IllegalTransition, match="1 sealed siblings"):
                apply(ledger, 5, COMPLETE)

    def test_a_block_cannot_be_stored_for_two_rollouts_under_one_name(self) -> None:
        with pytest.raises(TwoOwners):
            fold([*STARTED, BLOCK])


# ---------------------------------------------------------------------- whole runs


def edit_rows(store: MemoryStore, change: Callable[[TurnRow], TurnRow]) -> None:
    """Alter token rows so that every digest fits again."""

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        for at, row in enumerate(rows):
            if isinstance(row.record, schema.PayloadStored) and row.blob is not None:
                turns = decode_block(row.blob, row.record.digest, "x")
                block = encode_block(row.record.block, [change(turn) for turn in turns])
                rows[at] = row._replace(record=block.stored(), blob=block.data)

    rewrite(store, RUN, edit)


def test_a_sound_run_with_many_samples_is_proven_with_its_numbers() -> None:
    store = finished_run(multi_turn=True)
    report = verify(store, RUN)
    assert report.sound, report.problems
    assert (report.consumed, report.lost, report.rollouts_sealed) == (12, 0, 24)
    assert report.samples_sealed > report.rollouts_sealed
    assert summary(store, RUN)["counts"]["samples_sealed"] == report.samples_sealed
    edit_rows(store, lambda row: row)
    assert verify(store, RUN).sound


def test_the_history_of_a_group_names_the_sample_of_each_turn_and_the_samples_of_each_slot() -> None:
    store = finished_run(multi_turn=True)
    several = 0
    for ordinal in range(12):
        history = group_history(store, RUN, ordinal)
        turns = {entry["sibling"]: entry["sample"] for entry in history if entry["kind"] == "turn_committed"}
        for entry in (entry for entry in history if entry["kind"] == "sealed"):
            for group, sibling, samples in zip(entry["groups"], entry["siblings"], entry["samples"], strict=True):
                if group == ordinal:
                    assert samples - turns.get(sibling, 0) in (1, 2)
                    several += samples > 1
    assert several


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: replace(row, sample=0), "prefix"),
        (lambda row: replace(row, sample=2 * row.sample), "gap"),
        (lambda row: replace(row, start=row.start + 1), "prefix"),
        (lambda row: replace(row, sample=row.turn, start=0), "samples"),
    ],
)
def test_rows_moved_to_other_samples_are_found(change: Callable[[TurnRow], TurnRow], says: str) -> None:
    store = finished_run(multi_turn=True)
    edit_rows(store, change)
    assert says in problems(store)


def test_a_journal_that_miscounts_samples_is_found() -> None:
    store = finished_run(multi_turn=True)

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        """Every slot whose last turn opened its last sample seems to have ended the sample before, or the reverse."""
        sealed: dict[tuple[int, int], int] = {}
        for at, row in enumerate(rows):
            record = row.record
            if isinstance(record, schema.TurnCommitted):
                sealed[record.group, record.sibling] = record.sample
            elif isinstance(record, schema.Sealed):
                pairs = zip(record.groups, record.siblings, record.samples, strict=True)
                other = tuple(
                    samples if (last := sealed.get((group, sibling))) is None else 2 * last + 3 - samples
                    for group, sibling, samples in pairs
                )
                rows[at] = row._replace(record=msgspec.structs.replace(record, samples=other))

    rewrite(store, RUN, edit)
    assert "samples, as the journal says" in problems(store)
