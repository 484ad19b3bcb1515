"""What a run keeps: the transitions, the plan, and a deletion that may stop, fail and go on anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import pytest

from storage import retention, schema
from storage.clock import VirtualClock
from storage.errors import CheckpointRefused, IllegalTransition, StoreUnavailable, TwoOwners
from storage.ledger import Block, Lease, Ledger, Step
from storage.memory import MemoryStore
from storage.pins import pin, pinned, unpin
from storage.restore import load_base, plan_restore
from storage.retention import Deletion, Doomed, Retention, check_lasting, objects_of, plan
from storage.runs import RunPaths
from storage.schema import CheckpointPublished, Deleted, PayloadStored, Record, Retired, RunClaimed
from storage.snapshot import ledger_rows, rebuild
from storage.transitions import apply
from tests.storage.published_runs import Publisher, floats

RUN = "r"
PATHS = RunPaths(RUN)
KEEP = Retention(last=2, every=0, payload="keep", pin_s=60.0)


def checkpoint(step: int) -> CheckpointPublished:
    return CheckpointPublished(step, step, f"m{step}", "digest", 1, 1)


def ledger_of(*steps: int, last: int = 0) -> Ledger:
    """A ledger with checkpoints of these steps, and two rows of block `b<step>` for each step up to `last`."""
    ledger = Ledger(1)
    apply(ledger, 0, RunClaimed(1, "o", "start"))
    for step in range(1, (last or steps[-1]) + 1):
        ledger.blocks[f"b{step}"] = Block("d", 1, inline=False, retained=2)
        ledger.steps[step] = Step(Lease(step, step, step - 1, (), False, {f"b{step}": 2}), "s", "w", step)
        ledger.step = step
    for step in steps:
        do(ledger, checkpoint(step))
    return ledger


def do(ledger: Ledger, record: Record) -> None:
    apply(ledger, ledger.next_seq, record)


def retire(*manifests: str, kept: tuple[str, ...] = (), blocks: tuple[str, ...] = ()) -> Retired:
    return Retired(manifests, kept, blocks)


def steps(found: Iterable[CheckpointPublished]) -> list[int]:
    return [one.step for one in found]


# ---------------------------------------------------------------------- transitions


def test_nothing_is_forgotten_that_nobody_retired() -> None:
    ledger = ledger_of(3, 6, 9, 12, 15, last=16)
    assert steps(ledger.checkpoints) == [3, 6, 9, 12, 15]
    assert list(ledger.steps) == list(range(1, 17))
    assert plan_restore(ledger, RUN).genesis


def test_a_checkpoint_is_tried_then_kept_then_retired_then_gone() -> None:
    ledger = ledger_of(3, 6, 9, 12, last=14)
    ledger.spent_files = {}
    do(ledger, retire("m3", kept=("m6",)))
    assert (steps(ledger.checkpoints), steps(ledger.kept), steps(ledger.retired)) == ([9, 12], [6], [3])
    assert list(ledger.steps) == [10, 11, 12, 13, 14]
    assert set(ledger.blocks) == {f"b{step}" for step in range(10, 15)}
    assert list(ledger.spent_files) == [f"b{step}" for step in range(1, 10)]
    assert not plan_restore(ledger, RUN).genesis
    assert steps(plan_restore(ledger, RUN).checkpoints) == [12, 9], "a kept one is no place to begin"
    do(ledger, retire("m6", blocks=("b1", "b2")))
    assert (steps(ledger.kept), steps(ledger.retired), list(ledger.retired_blocks)) == ([], [3, 6], ["b1", "b2"])
    assert list(ledger.steps) == [10, 11, 12, 13, 14], "a kept one needs no steps"
    do(ledger, Deleted(("m3",), ("b2",)))
    assert (steps(ledger.retired), list(ledger.retired_blocks)) == ([6], ["b1"])
    assert (ledger.counts["retired"], ledger.counts["deleted"]) == (2, 1)


KEPT = (retire(kept=("m3",)),)
GONE = (retire("m3", blocks=("x",)),)


@pytest.mark.parametrize(
    ("before", "record", "expected"),
    [
        ((), retire(), "at least one name"),
        ((), retire("m3", "m3"), "each once"),
        ((), retire("m3", kept=("m3",)), "each once"),
        ((), retire(blocks=("x", "x")), "each once"),
        ((), retire("m4"), "one of"),
        ((), retire(kept=("m4",)), "one of"),
        ((), retire("m6"), "the oldest of"),
        ((), retire(kept=("m6",)), "the oldest of"),
        ((), retire("m3", "m6", "m9"), "never the newest"),
        ((), retire(kept=("m3", "m6", "m9")), "never the newest"),
        ((), retire("m9"), "the oldest of"),
        ((), retire(blocks=("b10",)), "no redo needs"),
        (KEPT, retire(kept=("m3",)), "kept ones once"),
        (GONE, retire("m3"), "one of"),
        (GONE, retire(kept=("m3",)), "one of"),
        (GONE, retire(blocks=("x",)), "not retired before"),
        ((), Deleted(("m3",), ()), "what was retired"),
        (KEPT, Deleted(("m3",), ()), "what was retired"),
        (GONE, Deleted((), ()), "what was retired"),
        (GONE, Deleted(("m3", "m3"), ()), "each once"),
        (GONE, Deleted((), ("y",)), "what was retired"),
        ((*GONE, Deleted(("m3",), ("x",))), Deleted(("m3",), ()), "what was retired"),
    ],
)
def test_an_illegal_retirement_changes_nothing(before: tuple[Record, ...], record: Record, expected: str) -> None:
    ledger = ledger_of(3, 6, 9, last=10)
    for one in before:
        do(ledger, one)
    rows = ledger_rows(ledger)
    with pytest.raises(IllegalTransition) as caught:
        do(ledger, record)
    assert expected in caught.value.expected
    assert ledger_rows(ledger) == rows


def test_the_name_of_a_retired_block_is_never_used_again() -> None:
    ledger = ledger_of(3, 6)
    do(ledger, retire(blocks=("x",)))
    with pytest.raises(TwoOwners):
        do(ledger, PayloadStored("x", "d", 1, inline=False))


def test_a_snapshot_holds_what_is_kept_and_what_is_retired() -> None:
    ledger = ledger_of(3, 6, 9, 12)
    do(ledger, retire("m3", kept=("m6",), blocks=("x", "y")))
    again = rebuild(ledger_rows(ledger))
    assert ledger_rows(again) == ledger_rows(ledger)
    for one in (ledger, again):
        do(one, Deleted(("m3",), ("x",)))
        do(one, retire("m6"))
    assert ledger_rows(again) == ledger_rows(ledger)
    assert (steps(again.retired), list(again.retired_blocks)) == ([6], ["y"])


# ---------------------------------------------------------------------- the plan


def planned(ledger: Ledger, settings: Retention, spent: Iterable[str] = ()) -> Retired | None:
    """The plan, which must be legal and leave nothing to plan."""
    found = plan(ledger, settings, spent)
    if found is not None:
        do(ledger, found)
        assert plan(ledger, settings, spent) is None
    return found


def test_the_newest_stay_and_every_nth_stays_beside_them() -> None:
    settings = Retention(last=3, every=6, payload="keep", pin_s=60.0)
    ledger = Ledger(1)
    apply(ledger, 0, RunClaimed(1, "o", "start"))
    for step in range(1, 31):
        ledger.steps[step] = Step(Lease(step, step, step - 1, (), False, {}), "s", "w", step)
        ledger.step = step
        if step % 3 == 0:
            do(ledger, checkpoint(step))
            planned(ledger, settings)
            assert steps(ledger.checkpoints) == list(range(max(3, step - 6), step + 1, 3))
            assert len(ledger.steps) <= 9
    assert steps(ledger.kept) == [6, 12, 18]
    assert steps(ledger.retired) == [3, 9, 15, 21]
    assert planned(ledger, replace(settings, every=0)) == retire("m6", "m12", "m18"), "as the settings are now"
    assert planned(ledger, replace(settings, last=2)) == retire(kept=("m24",))
    assert planned(ledger, replace(settings, last=9)) is None, "what is retired stays so"


def test_a_plan_retires_only_blocks_that_nothing_needs_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_of(3, last=4)
    monkeypatch.setattr(retention, "MOST_BLOCKS", 2)
    spent = ["b4", "x", "b3", "y", "z"]
    assert plan(ledger, KEEP, spent) == retire(blocks=("x", "y"))
    do(ledger, retire(blocks=("x", "y")))
    assert plan(ledger, KEEP, spent) == retire(blocks=("z",))


# ---------------------------------------------------------------------- deletion


class Refusing(MemoryStore):
    """Cannot delete keys that contain one of `stuck`, and answers no delete while `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: list[str] = []
        self.away = False
        self.calls = 0

    def delete(self, keys: Iterable[str]) -> list[str]:
        self.calls += 1
        if self.away:
            raise StoreUnavailable("no reply", expected="a reply", action="again")
        listed = list(keys)
        refused = [key for key in listed if any(part in key for part in self.stuck)]
        super().delete([key for key in listed if key not in refused])
        return refused


class Published:
    """Checkpoints of steps 1 to 5: one tensor never changes, one is the same in steps 1 and 2 and again in 5, one in
    steps 1 and 2 only, one is always new. The first three are retired."""

    def __init__(self) -> None:
        self.store = Refusing()
        publisher = Publisher(self.store, RUN, shard_bytes=4)
        again = {1: 7.0, 2: 7.0, 3: 3.5, 4: 4.5, 5: 7.0}
        self.records = [
            publisher.publish(
                step,
                {
                    "a": floats(1.0),
                    "b": floats(again[step]),
                    "c": floats(10.0 + step),
                    "d": floats(20.0 + max(step, 2)),
                },
            )
            for step in range(1, 6)
        ]
        self.retired, self.left = self.records[:3], self.records[3:]
        self.clock = VirtualClock()
        self.whole = set(self.keys())

    def keys(self) -> list[str]:
        return [key for key in self.store._objects if "/objects/" in key or "/checkpoints/" in key]

    def deletion(self, go_on: Callable[[], bool] = lambda: True, gone: Iterable[str] = ()) -> Deletion:
        left = [one for one in self.retired if one.manifest not in gone]
        doomed = Doomed(tuple(left), (), tuple(self.left))
        made = Deletion(self.store, RUN, doomed, KEEP, self.clock, go_on)
        made.run()
        return made

    def expected(self, *kept: CheckpointPublished) -> set[str]:
        """Exactly what these checkpoints and those that are left consist of."""
        stay = [*kept, *self.left]
        objects = {PATHS.object(digest) for digest in self.objects(*stay)}
        return objects | {PATHS.manifest(one.manifest) for one in stay}

    def objects(self, *records: CheckpointPublished) -> set[str]:
        return objects_of(self.store, RUN, records)


@pytest.fixture
def published() -> Published:
    return Published()


def test_a_deletion_leaves_exactly_what_the_checkpoints_need_that_are_left(published: Published) -> None:
    expected = published.expected()
    assert expected < published.whole
    done = published.deletion()
    assert (done.problem, done.deleted) == ("", Deleted(tuple(one.manifest for one in published.retired), ()))
    assert set(published.keys()) == expected


@pytest.mark.parametrize("pinned_step", [1, 2, 3])
def test_a_pinned_checkpoint_stays_whole_until_it_is_unpinned_or_the_pin_is_old(
    published: Published, pinned_step: int
) -> None:
    one = published.records[pinned_step - 1]
    key = pin(published.store, RUN, one.manifest, "test", published.clock)
    expected = published.expected(one)
    done = published.deletion()
    assert done.deleted is not None
    assert one.manifest not in done.deleted.manifests
    assert len(done.deleted.manifests) == 2
    assert set(published.keys()) == expected
    if pinned_step == 1:
        unpin(published.store, RUN, key)
    else:
        published.clock.advance(61.0)
    again = published.deletion(gone=done.deleted.manifests)
    assert again.deleted == Deleted((one.manifest,), ())
    assert set(published.keys()) == published.expected()


def test_a_pin_that_cannot_be_read_counts(published: Published) -> None:
    one = published.retired[0]
    published.store.create(PATHS.pin(one.manifest, "x"), b"not a pin")
    published.clock.advance(1e9)
    assert pinned(published.store, RUN, published.clock, 60.0) == {one.manifest}
    expected = published.expected(one)
    published.deletion()
    assert set(published.keys()) == expected


@pytest.mark.parametrize("stops", range(6))
def test_a_deletion_that_stops_anywhere_is_gone_on_with(
    published: Published, stops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each of its calls in turn, as by a crash: nothing that was not reported is believed gone."""
    monkeypatch.setattr(retention, "BATCH", 1)
    expected = published.expected()
    tickets = iter(range(stops))
    stopped = published.deletion(lambda: next(tickets, None) is not None)
    assert stopped.problem == ""
    assert published.store.calls == stops
    assert expected <= set(published.keys())
    gone = stopped.deleted.manifests if stopped.deleted else ()
    for one in published.retired:
        key = PATHS.manifest(one.manifest)
        assert (key in published.store._objects) == (one.manifest not in gone), "what is not gone can be gone on with"
    for known in (gone, ()):  # the record of what is gone may be lost, too
        again = published.deletion(gone=known)
        assert again.problem == ""
    assert set(published.keys()) == expected


def test_a_key_that_cannot_be_deleted_keeps_its_manifest_and_the_others_go(published: Published) -> None:
    lost = published.objects(published.retired[1]) - published.objects(published.retired[0], *published.left)
    published.store.stuck = [min(lost)]
    done = published.deletion()
    assert done.deleted == Deleted((published.retired[0].manifest, published.retired[2].manifest), ())
    assert min(lost) in done.problem
    published.store.stuck = [published.retired[1].manifest]
    assert published.retired[1].manifest in published.deletion(gone=done.deleted.manifests).problem
    published.store.stuck = []
    again = published.deletion(gone=done.deleted.manifests)
    assert (again.problem, again.deleted) == ("", Deleted((published.retired[1].manifest,), ()))


def test_a_store_that_does_not_answer_is_the_problem_and_the_keys_are_unsure(published: Published) -> None:
    published.store.away = True
    done = published.deletion()
    assert done.deleted is None
    assert "no reply" in done.problem
    assert {key.rpartition("/")[2] for key in done.unsure} == done.objects[published.retired[0].manifest]
    assert set(published.keys()) == published.whole


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_retired_checkpoint_with_a_damaged_manifest_holds_up_nothing(published: Published, damage: str) -> None:
    key = PATHS.manifest(published.retired[1].manifest)
    own = published.objects(published.retired[1]) - published.objects(*published.left, published.retired[0])
    expected = published.expected() | {PATHS.object(digest) for digest in own}
    data = bytearray(published.store._objects.pop(key))
    if damage == "flipped":
        data[random.Random(0).randrange(len(data))] ^= 1
        published.store._objects[key] = bytes(data)
    done = published.deletion()
    assert (done.problem, done.deleted) == ("", Deleted(tuple(one.manifest for one in published.retired), ()))
    assert set(published.keys()) == expected, "its own objects are orphans now"


def test_a_needed_checkpoint_whose_manifest_is_damaged_holds_up_every_object(published: Published) -> None:
    del published.store._objects[PATHS.manifest(published.left[0].manifest)]
    done = published.deletion()
    assert "cannot be read" in done.problem
    assert done.deleted is None
    assert len(published.keys()) == len(published.whole) - 1


def test_blocks_go_and_those_that_cannot_stay_on_the_list(published: Published) -> None:
    for name in ("1-w-1", "1-w-2", "1-w-3"):
        published.store.create(PATHS.block(name), b"x")
    published.store.stuck = ["1-w-2"]
    doomed = Doomed((), ("1-w-1", "1-w-2", "missing"), tuple(published.left))
    deletion = Deletion(published.store, RUN, doomed, KEEP, published.clock, lambda: True)
    deletion.run()
    assert deletion.deleted == Deleted((), ("1-w-1", "missing"))
    assert "1-w-2" in deletion.problem
    assert sorted(published.store.list(PATHS.payload)) == [PATHS.block("1-w-2"), PATHS.block("1-w-3")]


# ---------------------------------------------------------------------- readers, publications


@pytest.mark.parametrize("moment", ["before the retirement", "after the retirement", "after the pins were listed"])
def test_whoever_pins_and_then_checks_keeps_the_checkpoint_or_learns_that_it_is_retired(
    published: Published, moment: str
) -> None:
    """A reader's two steps, in each place among those of the manager."""
    ledger = Ledger(1)
    apply(ledger, 0, RunClaimed(1, "o", "start"))
    ledger.checkpoints = list(published.records)
    one = published.records[0]
    refused: list[bool] = []

    def read() -> None:
        pin(published.store, RUN, one.manifest, "reader", published.clock)
        refused.append(all(found.manifest != one.manifest for found in (*ledger.kept, *ledger.checkpoints)))

    if moment == "before the retirement":
        read()
    found = plan(ledger, KEEP)
    assert found is not None
    do(ledger, found)
    if moment == "after the retirement":
        read()

    def go_on() -> bool:
        if moment == "after the pins were listed" and not refused:
            read()
        return True

    deletion = Deletion(published.store, RUN, Doomed.of(ledger), KEEP, published.clock, go_on)
    deletion.run()
    there = PATHS.manifest(one.manifest) in published.store._objects
    assert refused == [moment != "before the retirement"]
    assert refused[0] or there, "a reader that was not refused has its checkpoint"
    if there:
        digests = published.objects(one)
        assert all(PATHS.object(digest) in published.store._objects for digest in digests)


def test_no_checkpoint_is_recorded_that_rests_on_what_a_stopped_manager_may_be_deleting(published: Published) -> None:
    """Step 2 holds the tensor that only step 1 and the newest, step 5, have, too."""
    first, second, *_ = published.records

    def written(one: CheckpointPublished) -> tuple[str, str]:
        return one.manifest, one.digest

    needed = [published.records[4]]
    check_lasting(published.store, RUN, written(published.records[4]), set(), [first], needed)
    check_lasting(published.store, RUN, written(second), set(), [first], [second])
    with pytest.raises(CheckpointRefused):
        check_lasting(published.store, RUN, written(second), set(), [first], [published.records[3]])
    endangered = published.objects(second) - published.objects(*needed)
    with pytest.raises(CheckpointRefused):
        check_lasting(published.store, RUN, written(second), endangered, [], needed)
    del published.store._objects[PATHS.manifest(first.manifest)]
    check_lasting(published.store, RUN, written(second), set(), [first], [published.records[3]])


def test_a_restore_after_retention_begins_at_the_newest_and_has_what_a_damaged_one_needs(published: Published) -> None:
    published.deletion()
    ledger = Ledger(1)
    ledger.checkpoints, ledger.step = list(published.left), 5
    ledger.steps = {5: Step(Lease(5, 5, 4, (), False, {}), "s", "w", 5)}
    plan_ = plan_restore(ledger, RUN)
    assert load_base(published.store, plan_).step == 5
    del published.store._objects[PATHS.manifest(published.left[1].manifest)]
    assert load_base(published.store, plan_).step == 4


def test_records_of_retention_survive_their_encoding() -> None:
    for record in (retire("a", kept=("b",), blocks=("c",)), Deleted(("a",), ("c",))):
        assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
        assert schema.KINDS[schema.KIND_OF[type(record)]] is type(record)
