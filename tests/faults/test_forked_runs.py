"""Whole runs forked in their middle: the fork goes on to its end, each prompt is trained once in it, and the run that
was forked does not notice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.config import RunConfig
from flows.seaweed import S3Server
from gpu.generation.engine import Cached
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.spec import RunSpec
from gpu.training import checkpoints
from storage import inspection, schema
from storage.capture import CaptureBuffers
from storage.errors import ArtifactCorrupt
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import rows_of
from storage.local import LocalStore
from storage.opening import open_store
from storage.runs import RunPaths, open_run
from storage.segment import Row
from storage.verify import Report, verify
from tests.faults.house import House, small, until
from tests.faults.test_evaluation import SUITES, evaluated
from tests.servers import ROOT
from tests.storage.editing import rewrite

A, B = "a", "b"
LENGTH, EVERY = 16, 3


def by_rollout(spec: RunSpec) -> EngineServer:
    """Tokens depend on the rollout alone, so a group that starts again comes to the same."""
    fake = FakeEngine(slots=spec.engine.slots, tokens=3, vocabulary=6, by_rollout=True)
    return EngineServer(fake, Cached.KEEP)


def house_of(store: Store, name: str, config: RunConfig) -> House:
    return House(Path(), config, engine=by_rollout, store=store, name=name)


def forked_house(store: Store, name: str = B) -> House:
    """As `tidegate resume` would drive it."""
    return house_of(store, name, RunConfig.model_validate(open_run(store, name).settings))


def configuration(folder: Path, **changes: Any) -> RunConfig:
    return small(storage={"url": str(folder), "snapshot_every": 1000}, **changes).model_copy(update={"run": A})


def run_whole(folder: Path, config: RunConfig) -> Path:
    """In shards of 64 KiB, so that a checkpoint is several objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "CaptureBuffers", lambda: CaptureBuffers(1 << 16))
        house = house_of(LocalStore(folder), A, config)
        asyncio.run(house.run())
    assert house.verify().sound
    return folder


@pytest.fixture(scope="module")
def finite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 prompts in 8 steps, checkpoints of steps 3, 6 and 8, evaluations every 3 steps; finished."""
    folder = tmp_path_factory.mktemp("finite")
    config = configuration(folder, evaluation=evaluated(EVERY), checkpoint={"every": EVERY, "max_unsaved": 50})
    return run_whole(folder, config)


@pytest.fixture
def finished(finite: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finite, tmp_path / "store"))


def fork(folder: Path, *arguments: str, code: int = 0) -> None:
    assert main(["fork", *arguments, "--storage", str(folder)]) == code


def everything(folder: Path, run: str = A) -> dict[str, bytes]:
    found = [path for path in (folder / "runs" / run).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}


def records(store: Store, run: str) -> list[schema.Record]:
    return [row.record for row in rows_of(read_all(store, run))]


def trained(store: Store, run: str) -> list[tuple[int, ...]]:
    """The groups of each step, in order."""
    return [entry["groups"] for entry in inspection.steps(store, run)]


def check_forked(store: Store, before: set[int], length: int = LENGTH) -> Report:
    """A finished fork: what was trained `before` was not trained again, everything else was, once."""
    report = verify(store, B)
    assert report.sound, report.problems
    assert report.finished
    times = Counter(ordinal for groups in trained(store, B) for ordinal in groups)
    assert set(times.values()) == {1}
    assert set(times) == set(range(length)) - before
    assert (report.consumed, report.inherited_consumed, report.lost, report.unsettled) == (length, len(before), 0, 0)
    return report


def consumed_at(store: Store, run: str, step: int) -> set[int]:
    return {ordinal for groups in trained(store, run)[:step] for ordinal in groups}


# ---------------------------------------------------------------------- whole runs


async def test_a_fork_trains_exactly_what_was_not_trained_at_its_checkpoint(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(finished)
    before = everything(finished)
    fork(finished, f"{A}@{EVERY}", B, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["steps_left"], told["damage"]) == (EVERY, [4, 5, 6, 7, 8], None)
    assert (told["consumed"], told["groups_left"], told["evaluations_left"]) == (6, 10, len(SUITES) * 3)
    house = forked_house(store)
    await house.run()
    report = check_forked(store, consumed_at(store, A, EVERY))
    assert (report.steps, report.inherited_steps, report.steps_redone) == (8, EVERY, 0)
    states = {entry["step"]: entry["state_digest"] for entry in inspection.steps(store, A)}
    assert [one.base for one in house.resumed] == [EVERY]
    assert told["state_digest"] == states[EVERY]
    measured = Counter((one["suite"], one["step"]) for one in inspection.evaluations(store, B))
    assert measured == {(suite["name"], step): 1 for suite in SUITES for step in (3, 6, 8)}, (
        "also those of its own step"
    )
    assert everything(finished) == before
    assert inspection.summary(store, B)["forked_from"] == f"{A}@{EVERY} in {store.url}"
    assert main(["diff", f"{A}@{EVERY}", f"{B}@{EVERY}", "--storage", str(finished)]) == 0
    assert main(["verify", B, "--storage", str(finished)]) == 0
    assert everything(finished) == before, "a comparison leaves no pin"


async def test_an_on_policy_fork_without_changes_reaches_what_the_other_run_reached(tmp_path: Path) -> None:
    """Then one that learns twice as fast does not: the comparison can fail."""
    config = configuration(
        tmp_path, rollout={"staleness": 0, "batch": 3, "siblings": 4, "executing": 16},
        environment={"name": "reverse", "options": {"letters": 2}, "epochs": None}, training={"steps": 8},
    )  # fmt: skip
    await asyncio.to_thread(run_whole, tmp_path, config)
    store = LocalStore(tmp_path)
    fork(tmp_path, f"{A}@{EVERY}", B)
    fork(tmp_path, f"{A}@{EVERY}", "c", "--set", "training.learning_rate=0.02")
    outcomes: dict[str, list[tuple[Any, ...]]] = {}
    for name in (A, B, "c"):
        if name != A:
            await forked_house(store, name).run()
        assert verify(store, name).sound
        commits = [one for one in records(store, name) if isinstance(one, schema.StepCommitted)]
        states = [(one.step, one.state_digest, one.weights_digest) for one in commits if one.step > EVERY]
        outcomes[name] = [*zip(states, trained(store, name)[-len(states) :], strict=True)]
    assert len(outcomes[A]) == 8 - EVERY
    assert outcomes[B] == outcomes[A]
    assert outcomes["c"][0][0][1] != outcomes[A][0][0][1]


async def test_a_finished_run_goes_on_in_a_fork_with_more_steps(tmp_path: Path) -> None:
    config = configuration(
        tmp_path, environment={"name": "reverse", "options": {"letters": 2}, "epochs": None}, training={"steps": 4}
    )
    await asyncio.to_thread(run_whole, tmp_path, config)
    store = LocalStore(tmp_path)
    fork(tmp_path, A, B, "--set", "training.steps=7")
    await forked_house(store).run()
    report = verify(store, B)
    assert report.sound, report.problems
    assert (report.steps, report.inherited_steps, report.trained_twice) == (7, 4, 0)
    assert report.consumed == 7 * 2


async def test_a_fork_may_have_groups_of_another_size_and_another_bound(finished: Path) -> None:
    store = LocalStore(finished)
    fork(finished, f"{A}@6", B, "--set", "rollout.siblings=4", "--set", "rollout.staleness=0")
    await forked_house(store).run()
    report = check_forked(store, consumed_at(store, A, 6))
    assert (report.staleness_bound, report.staleness_max) == (0, 0)
    assert open_run(store, B).num_siblings == 4


async def test_a_fork_that_takes_steps_back_is_sound_before_it_trains_their_groups_again(finished: Path) -> None:
    """Then at the end too: the trainer dies, and the fork goes back to the checkpoint it was copied from."""
    store = LocalStore(finished)
    changes = ("checkpoint.every=50", "checkpoint.max_unsaved=50", "checkpoint.redo=requeue")
    fork(finished, f"{A}@{EVERY}", B, *[part for change in changes for part in ("--set", change)])
    house = forked_house(store)

    async def kill(house: House) -> None:
        await until(lambda: house.steps_seen[-1:] == [EVERY + 2])
        assert house.kill("trainer", random.Random(0))

    await house.run(kill)
    assert check_forked(store, consumed_at(store, A, EVERY)).steps_reverted >= 2

    def cut(rows: list[Row], incarnations: list[int]) -> None:
        at = next(at for at, row in enumerate(rows) if isinstance(row.record, schema.StepsReverted))
        del rows[at + 1 :], incarnations[at + 1 :]

    rewrite(store, B, cut)
    report = verify(store, B)
    assert report.problems == []
    assert report.groups_reverted >= 4
    assert report.consumed == report.inherited_consumed


async def test_a_fork_that_is_killed_is_restored_from_its_copied_checkpoint(finished: Path) -> None:
    """Before it has published one of its own: the manager dies, and the trainer with it."""
    store = LocalStore(finished)
    fork(finished, f"{A}@{EVERY}", B, "--set", "checkpoint.every=50", "--set", "checkpoint.max_unsaved=50")
    house = forked_house(store)

    async def chaos(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes)
        await until(lambda: house.manager().control.ledger.step >= EVERY + 2)
        for name in ("manager", "trainer"):
            house.cluster.kill(name)

    await house.run(chaos)
    report = check_forked(store, consumed_at(store, A, EVERY))
    assert [one.base for one in house.resumed][:2] == [EVERY, EVERY]
    assert (report.incarnations, report.steps_diverged) == (3, 0)
    assert report.steps_redone >= 1, "step 4 was durable"


# ---------------------------------------------------------------------- killed

KILL = """
import os, signal, sys
from flows.cli import main
from storage.local import LocalStore
part, number, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
create, seen = LocalStore.create, 0
def killing(self, key, data):
    global seen
    seen += part in key and "probe" not in key
    if part in key and "probe" not in key and seen == number:
        if when == "after":
            create(self, key, data)
        os.kill(os.getpid(), signal.SIGKILL)
    create(self, key, data)
LocalStore.create = killing
sys.exit(main(["fork", *sys.argv[4:]]))
"""


@pytest.mark.parametrize(
    ("part", "number", "when", "begun"),
    [
        ("/a/pins/", 1, "after", False),
        ("/b/objects/", 3, "before", False),
        ("/b/run.json", 1, "after", True),
        ("/b/journal/", 1, "before", True),
    ],
)
async def test_a_fork_killed_in_its_middle_is_no_run_and_completes_when_it_is_run_again(
    part: str, number: int, when: str, begun: bool, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, store = everything(finished), LocalStore(finished)
    command = [sys.executable, "-c", KILL, part, str(number), when, f"{A}@{EVERY}", B, "--storage", str(finished)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = await asyncio.to_thread(subprocess.run, command, env=environment, cwd=finished, timeout=100)
    assert killed.returncode == -signal.SIGKILL
    left = {key for key in everything(finished) if key not in before}
    assert len(left) == 1
    assert all("/pins/" in key for key in left)
    assert main(["resume", B, "--storage", str(finished)]) == 2
    said = capsys.readouterr().err
    assert (f"tidegate fork {A}@{EVERY} {B}" in said) == begun
    fork(finished, f"{A}@{EVERY}", B)
    await forked_house(store).run()
    check_forked(store, consumed_at(store, A, EVERY))
    assert {key: data for key, data in everything(finished).items() if key not in left} == before


# ---------------------------------------------------------------------- damage


async def test_a_journal_damaged_in_its_middle_is_left_by_a_fork_that_says_what_is_lost(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(finished)
    steps = {entry["step"]: set(entry["groups"]) for entry in inspection.steps(store, A)}
    segments = list(read_all(store, A))
    slot = next(
        one.header.slot for one in segments
        if any(isinstance(row.record, schema.StepCommitted) and row.record.step == 5 for row in one.rows)
    )  # fmt: skip
    path = finished / RunPaths(A).segment(slot)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    damaged = everything(finished)
    with pytest.raises(ArtifactCorrupt, match="tidegate fork RUN NEW --last-good"):
        await house_of(store, A, RunConfig.model_validate(open_run(store, A).settings)).run()
    fork(finished, A, B, code=2)
    assert f"tidegate fork {A} {B} --last-good" in capsys.readouterr().err
    assert not (finished / "runs" / B).exists()
    fork(finished, A, B, "--last-good")
    said = capsys.readouterr().out
    for part in (
        f"{B} in {store.url} is a fork of {A}@{EVERY}", f"damaged: slot {slot}, [digest]", "later steps (4 to 8)",
        f"lost: {len(segments) - slot} segments from there on, 1 of them unreadable",
    ):  # fmt: skip
        assert part in said, said
    assert not verify(store, A).sound
    await forked_house(store).run()
    check_forked(store, set[int]().union(*(steps[step] for step in range(1, EVERY + 1))))
    assert everything(finished) == damaged


# ---------------------------------------------------------------------- another store


async def test_a_run_of_a_folder_goes_on_in_a_bucket(
    finished: Path, seaweed: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    before, bucket = everything(finished), seaweed.url("forked")
    fork(finished, f"{A}@6", B, "--to", bucket, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["new_storage"]) == (6, open_store(bucket).url)
    assert told["written"] > told["size"]
    store = open_store(bucket)
    report = verify(store, B)
    assert report.sound, report.problems
    await forked_house(store).run()
    check_forked(store, consumed_at(LocalStore(finished), A, 6))
    assert everything(finished) == before
    assert main(["diff", f"{A}@6", f"{B}@6", "--storage", str(finished), "--right-storage", bucket]) == 0
