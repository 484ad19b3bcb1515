"""A fork counts when its first segment is there: killed before, it is made again; of two, one is."""

from __future__ import annotations

import threading

import pytest

from storage import fork as forking
from storage.errors import (
    ForkRefused,
    RunExists,
    UnknownRun,
)
from storage.filesystem import Bytes
from storage.memory import MemoryStore
from storage.runs import RunPaths, check_begun, create_run, open_run
from storage.verify import verify
from tests.simulation.world import RUN
from tests.storage.editing import finished_run
from tests.storage.forking import NEW, Dying, description, fork, objects, refused


def counts(store: MemoryStore) -> bool:
    """Whether there is a run of the new name; an unfinished fork is refused where a run would begin."""
    try:
        check_begun(store, open_run(store, NEW))
    except (UnknownRun, ForkRefused):
        return False
    return True


def _of_one_try(key: str) -> bool:
    """Segments have a writer's id; a killed probe leaves its objects, as with any run."""
    return "/journal/" in key or "/probe-" in key


@pytest.mark.parametrize("applied", [False, True])
def test_a_fork_killed_at_any_write_does_not_count_and_completes_when_it_is_run_again(applied: bool) -> None:
    whole = finished_run()
    fork(whole)
    expected = {key: data for key, data in objects(whole, NEW).items() if not _of_one_try(key)}
    died: list[str] = []
    for last in range(50):
        store = finished_run()
        before = objects(store, RUN)
        dying = Dying(store, last, applied)
        try:
            fork(dying)
            break
        except SystemExit:
            died.append(dying.died_at)
        complete = store.size(RunPaths(NEW).segment(0)) is not None
        assert counts(store) == complete
        left = {key for key in objects(store, RUN) if key not in before}
        assert all("/pins/" in key for key in left), "a pin grows old"
        if complete:
            with pytest.raises(RunExists, match=f"tidegate resume {NEW}"):
                fork(store)
        else:
            fork(store)
        assert counts(store)
        made = {key: data for key, data in objects(store, NEW).items() if not _of_one_try(key)}
        assert made == expected
        assert verify(store, NEW).sound
    assert {"run.json", "000000003-000001.json", "000000000000.arrow"} <= set(died)
    assert any(name.startswith("000000003-") for name in died[:1]), "the pin is first"
    assert len({name for name in died if len(name) == 64}) == 1, "the object"


def test_an_unfinished_fork_is_finished_by_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = finished_run()

    def dies(self: object, forked: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(forking._Making, "_commit", dies)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(SystemExit):
            fork(store, 1)
    refused(ForkRefused, f"tidegate fork {RUN}@1 {NEW}", store, lambda: check_begun(store, open_run(store, NEW)))
    assert "run.json says" in verify(store, NEW).problems[0]
    other = description(store, staleness=9)
    refused(RunExists, "an unfinished fork of other settings", store, lambda: fork(store, 1, made=other))
    with pytest.raises(RunExists, match="an unfinished fork of another checkpoint"):
        fork(store, 3)
    assert fork(store).step == 1, "the newest checkpoint is another one, but the name is taken by this fork"
    assert verify(store, NEW).sound


class Meeting(MemoryStore):
    """Whoever creates `key` waits for the other one."""

    def __init__(self, held: MemoryStore, key: str) -> None:
        super().__init__("sim")
        self._objects = held._objects  # pyright: ignore[reportPrivateUsage]
        self._key, self._barrier = key, threading.Barrier(2)

    def create(self, key: str, data: Bytes) -> None:
        if key == self._key:
            self._barrier.wait(10)
        super().create(key, data)


@pytest.mark.parametrize(
    ("key", "steps"),
    [
        (RunPaths(NEW).info, (1, 3)),
        (RunPaths(NEW).info, (3, 3)),
        (RunPaths(NEW).segment(0), (3, 3)),
    ],
)
def test_of_two_forks_to_one_name_one_wins(key: str, steps: tuple[int, int]) -> None:
    store = finished_run()
    meeting = Meeting(store, key)
    outcomes: list[object] = []

    def run(step: int) -> None:
        try:
            outcomes.append(fork(meeting, step).step)
        except RunExists as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(isinstance(one, RunExists) for one in outcomes) == [False, True], outcomes
    report = verify(store, NEW)
    assert report.sound, report.problems
    assert report.steps == next(one for one in outcomes if isinstance(one, int))


def test_a_plain_run_that_takes_the_name_meanwhile_keeps_it() -> None:
    store = finished_run()
    made = description(store)

    class Late(MemoryStore):
        def create(self, key: str, data: Bytes) -> None:
            if key == RunPaths(NEW).info:
                create_run(store, made)
            store.create(key, data)

    late = Late("sim")
    late._objects = store._objects  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RunExists, match="a run of its own"):
        fork(late)
    assert open_run(store, NEW).origin is None
    assert store.size(RunPaths(NEW).segment(0)) is None
