"""`verify` finds every edit, even one whose digests and chain were made to fit again."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from storage import schema
from storage.errors import SchemaUnsupported, StoreUnavailable, UnknownRun
from storage.journal import fold
from storage.memory import MemoryStore
from storage.payload import VersionSpan, decode_block, encode_block
from storage.restore import load_base, plan_restore
from storage.runs import RunPaths, open_run
from storage.schema import Record
from storage.segment import Row
from storage.verify import verify
from tests.simulation.world import RUN
from tests.storage.editing import finished_run, problems, rewrite


def edit_records(store: MemoryStore, change: Callable[[Record], Record | None]) -> None:
    """Replace (or drop, on None) records one by one, fixing numbers and digests."""

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        kept = [(row, found, inc) for row, inc in zip(rows, incarnations, strict=True) if (found := change(row.record))]
        rows[:] = [row._replace(record=found) for row, found, _ in kept]
        incarnations[:] = [inc for _, _, inc in kept]

    rewrite(store, RUN, edit)


def test_a_sound_run_is_proven_with_its_numbers() -> None:
    report = verify(finished_run(), RUN)
    assert report.sound, report.problems
    assert (report.consumed, report.handed_out, report.lost, report.trained_twice) == (12, 12, 0, 0)
    assert (report.steps, report.staleness_bound, report.checkpoints > 0) == (6, 1, True)
    assert 0 <= report.staleness_mean <= report.staleness_max <= 1


def test_rewriting_without_a_change_keeps_a_run_sound() -> None:
    store = finished_run()
    edit_records(store, lambda record: record)
    # Checkpoints name the position of their step, which rewriting keeps.
    assert verify(store, RUN).sound


def test_a_lost_ordinal_is_found() -> None:
    store = finished_run()

    def lose(record: Record) -> Record | None:
        if isinstance(record, schema.GroupReserved) and record.first <= 5 < record.first + record.count:
            return msgspec.structs.replace(record, count=record.count - 1) if record.count > 1 else None
        return record

    edit_records(store, lose)
    assert "never reserved" in problems(store) or "expected: ordinals from" in problems(store)


def test_an_ordinal_that_never_settles_is_found() -> None:
    store = finished_run()

    def drop(record: Record) -> Record | None:
        if isinstance(record, schema.LeaseIssued) and record.step == 3:
            return msgspec.structs.replace(record, groups=record.groups[1:])
        return record

    edit_records(store, drop)
    assert "every group settled" in problems(store)


def test_an_ordinal_trained_twice_is_found_and_counted() -> None:
    store = finished_run()
    first: list[int] = []

    def repeat(record: Record) -> Record | None:
        if isinstance(record, schema.LeaseIssued):
            first.append(record.groups[0])
            if record.step == 4:
                return msgspec.structs.replace(record, groups=(first[0], *record.groups[1:]))
        return record

    edit_records(store, repeat)
    report = verify(store, RUN)
    assert not report.sound
    assert report.trained_twice == 1
    assert f"group {first[0]}, which is consumed" in report.problems[0]


def test_a_committed_step_that_is_repeated_is_found() -> None:
    store = finished_run()

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        at = next(i for i, row in enumerate(rows) if isinstance(row.record, schema.StepCommitted))
        rows.insert(at, rows[at])
        incarnations.insert(at, incarnations[at])

    rewrite(store, RUN, edit)
    assert "no lease is open" in problems(store)


def with_evaluation(*changes: dict[str, object], due: bool = True) -> MemoryStore:
    """A finished run in which its last step was due and got one result for each of `changes`."""
    store = finished_run()

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        policy = next(row.record for row in reversed(rows) if isinstance(row.record, schema.PolicyPublished))
        assert isinstance(policy, schema.PolicyPublished)
        step = policy.number
        made = schema.EvaluationDone("s", step, policy.digest, False, step, step, 1, 2, 0, {"reward_mean": 1.0})
        records = [schema.EvaluationDue(step, ("s",))] if due else []
        records += [msgspec.structs.replace(made, **change) for change in changes]
        at = next(i for i, row in enumerate(rows) if isinstance(row.record, schema.RunFinished))
        rows[at:at] = [rows[at]._replace(record=record) for record in records]
        incarnations[at:at] = [incarnations[at]] * len(records)

    rewrite(store, RUN, edit)
    return store


def test_an_evaluation_with_its_one_result_is_sound_and_counted() -> None:
    report = verify(with_evaluation({}), RUN)
    assert report.sound, report.problems
    assert (report.evaluations, report.evaluations_mixed, report.evaluations_due) == (1, 0, 0)


def test_an_evaluation_with_two_results_or_none_is_found() -> None:
    assert "[evaluated_twice] 1" in problems(with_evaluation({}, {"metrics": {}}))
    assert "1 evaluations are due" in problems(with_evaluation())
    assert "never due" in problems(with_evaluation({}, due=False))


def test_an_evaluation_of_weights_that_were_never_published_is_found() -> None:
    assert "names weights w-other" in problems(with_evaluation({"digest": "w-other"}))
    assert "names weights w-other" in problems(with_evaluation({"digest": "w-other", "mixed": True, "oldest": 0}))
    assert "mixed=False" in problems(with_evaluation({"oldest": 0}))


def test_tokens_older_than_the_bound_are_found_even_when_all_digests_fit() -> None:
    store = finished_run()
    trained = {
        group: row.record.step
        for segment in _segments(store)
        for row in segment
        if isinstance(row.record, schema.LeaseIssued)
        for group in row.record.groups
    }
    victim = next(group for group, step in trained.items() if step == 6)

    def age(rows: list[Row], incarnations: list[int]) -> None:
        for i, row in enumerate(rows):
            record = row.record
            if isinstance(record, schema.Sealed) and victim in record.groups:
                rows[i] = row._replace(record=msgspec.structs.replace(record, oldest=(0,) * len(record.oldest)))
            if isinstance(record, schema.PayloadStored) and row.blob is not None:
                turns = decode_block(row.blob, record.digest, "x")
                if any(turn.group == victim for turn in turns):
                    old = [
                        type(turn)(**{name: getattr(turn, name) for name in turn.__slots__} | {
                            "spans": (VersionSpan(1, 0, turn.num_generated),)})
                        for turn in turns
                    ]  # fmt: skip
                    block = encode_block(record.block, old)
                    rows[i] = row._replace(record=block.stored(), blob=block.data)

    rewrite(store, RUN, age)
    assert "staleness at most 1" in problems(store)


def test_a_journal_that_hides_the_age_of_tokens_is_found() -> None:
    store = finished_run()

    def rejuvenate(record: Record) -> Record | None:
        if isinstance(record, schema.Sealed) and 0 in record.oldest:
            return msgspec.structs.replace(record, oldest=tuple(1 if old == 0 else old for old in record.oldest))
        return record

    edit_records(store, rejuvenate)
    assert "oldest version 0 in its tokens" in problems(store)


def test_a_changed_reward_is_found() -> None:
    store = finished_run()

    def bribe(record: Record) -> Record | None:
        if isinstance(record, schema.Sealed):
            return msgspec.structs.replace(record, rewards=tuple(2.0 for _ in record.rewards))
        return record

    edit_records(store, bribe)
    assert "reward" in problems(store)


def test_rows_of_another_rollout_are_found() -> None:
    store = finished_run()

    def cross(record: Record) -> Record | None:
        if isinstance(record, schema.Sealed) and len(record.rows) > 1:
            return msgspec.structs.replace(record, rows=record.rows[::-1])
        return record

    edit_records(store, cross)
    assert "its own rows" in problems(store)


@pytest.mark.parametrize("what", ["journal", "checkpoints", "objects"])
def test_a_flipped_byte_in_any_object_is_found(what: str) -> None:
    store = finished_run()
    dice = random.Random(1)
    for key in store.list(f"runs/{RUN}/{what}"):
        original = store._objects[key]
        altered = bytearray(original)
        altered[dice.randrange(len(altered))] ^= 1 << dice.randrange(8)
        store._objects[key] = bytes(altered)
        assert not verify(store, RUN).sound, key
        store._objects[key] = original
    assert verify(store, RUN).sound


def test_a_missing_object_is_found() -> None:
    store = finished_run()
    for what in ("checkpoints", "objects"):
        key = store.list(f"runs/{RUN}/{what}")[0]
        original = store._objects.pop(key)
        assert "missing" in problems(store)
        store._objects[key] = original


@pytest.mark.parametrize("what", ["/objects/", "/checkpoints/", "/journal/"])
def test_a_store_that_does_not_answer_says_nothing_about_a_run_or_a_checkpoint(what: str) -> None:
    class Away(MemoryStore):
        away = False

        def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if self.away and what in key:
                raise StoreUnavailable("no reply", expected="a reply", action="repair the store")
            return super().read(key, start, end)

    store = finished_run()
    away = Away()
    away._objects = store._objects
    plan = plan_restore(fold(store, RUN, 2)[0], RUN)
    away.away = True
    with pytest.raises(StoreUnavailable):
        verify(away, RUN)
    if what != "/journal/":
        with pytest.raises(StoreUnavailable):  # a checkpoint that could not be read is not a bad one
            load_base(away, plan)
    away.away = False
    assert verify(away, RUN).sound


def test_a_checkpoint_of_another_state_is_found() -> None:
    store = finished_run()

    def swap(record: Record) -> Record | None:
        if isinstance(record, schema.StepCommitted):
            return msgspec.structs.replace(record, state_digest=record.state_digest[::-1])
        return record

    edit_records(store, swap)
    assert "as committed" in problems(store)


def test_a_run_cut_at_its_end_is_unfinished_but_sound_and_says_what_is_unsettled() -> None:
    store = finished_run()
    keys = sorted(store.list(f"runs/{RUN}/journal"))
    for key in keys[len(keys) // 2 :]:
        del store._objects[key]
    report = verify(store, RUN)
    assert report.sound, report.problems
    assert report.finished == ""
    assert report.consumed + report.unsettled == report.handed_out


def test_an_unknown_run_and_an_unknown_schema_are_the_users_errors() -> None:
    store = finished_run()
    with pytest.raises(UnknownRun, match="holds sim") as caught:
        verify(store, "nothing")
    assert caught.value.exit_code == 2
    info = open_run(store, RUN)
    store._objects[RunPaths(RUN).info] = msgspec.json.encode(msgspec.structs.replace(info, schema=99))
    with pytest.raises(SchemaUnsupported, match="schema 99"):
        verify(store, RUN)


def _segments(store: MemoryStore) -> list[list[Row]]:
    from storage.journal import read_journal

    return [segment.rows for segment in read_journal(store, RUN)]
