"""Curves: every committed step is in TensorBoard's files once the run is over, whatever died."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from storage.errors import StoreUnavailable
from storage.filesystem import Bytes, Store
from storage.memory import MemoryStore
from storage.runs import RunPaths
from storage.schema import EvaluationDone
from tasks.metrics import MetricsLog, Point, event_file, last_written
from tests.rollout.building import RUN, Bench

METRICS = RunPaths(RUN).metrics


def scalars(data: bytes) -> list[tuple[int, str, float]]:
    """What TensorBoard would read: TFRecords of length (8), its checksum (4), the event, its checksum (4)."""
    found: list[tuple[int, str, float]] = []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    return found


def written(store: Store) -> list[tuple[int, str, float]]:
    return [entry for key in sorted(store.list(METRICS)) for entry in scalars(store.read(key))]


class Figures:
    async def metrics(self) -> dict[str, float]:
        return {"groups_leased": 2.0}


def log(store: Store, driver: str = "000001-000001") -> MetricsLog:
    return MetricsLog(store, RUN, driver, Figures())


def test_tensorboard_reads_a_runs_files_as_one_curve(tmp_path: Path) -> None:
    for driver, steps in (("000001-000001", (1, 2)), ("000002-000001", (3,))):
        data = event_file([Point(step, 10.0 + step, {"train/loss": 1.0 / step}) for step in steps])
        (tmp_path / f"events.out.tfevents.{steps[-1]:010d}.{driver}").write_bytes(data)
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.wall_time) for point in curves.Scalars("train/loss")] == [
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
    ]


def test_an_event_file_holds_its_points() -> None:
    data = event_file([Point(1, 10.0, {"train/loss": 0.5}), Point(2, 11.0, {"train/loss": 0.25, "rollout/x": 1.0})])
    assert scalars(data) == [(1, "train/loss", 0.5), (2, "train/loss", 0.25), (2, "rollout/x", 1.0)]


async def test_steps_and_figures_are_stored_when_flushed() -> None:
    store = MemoryStore()
    curves = log(store)
    await curves.step(1, {"loss": 0.5, "step": 1.0})
    await curves.step(2, {"loss": 0.25})
    assert store.list(METRICS) == []
    await curves.flush()
    await curves.flush()
    assert written(store) == [(1, "train/loss", 0.5), (1, "rollout/groups_leased", 2.0), (2, "train/loss", 0.25)]
    assert last_written(store, RUN) == 2


async def test_what_a_dead_driver_had_not_written_comes_from_the_journal_once() -> None:
    bench = Bench()
    for _ in range(3):
        bench.seal(bench.control.take("w", 4))
        bench.train()
    first = log(bench.store)
    await first.step(1, {"loss": 1.0})
    await first.flush()
    second = log(bench.store, "000002-000001")
    assert await second.backfill() == 2
    await second.flush()
    assert await log(bench.store).backfill() == 0
    assert last_written(bench.store, RUN) == 3


async def test_a_store_that_is_away_costs_no_point(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        down = True

        def create(self, key: str, data: Bytes) -> None:
            if self.down:
                raise StoreUnavailable("gone", expected="an answer", action="wait")
            super().create(key, data)

    store = Away()
    curves = log(store)
    await curves.step(1, {"loss": 0.5})
    await curves.flush()
    assert "try_with_the_next" in caplog.text
    store.down = False
    await curves.step(2, {"loss": 0.25})
    await curves.flush()
    assert [(step, name) for step, name, _ in written(store) if name == "train/loss"] == [
        (1, "train/loss"), (2, "train/loss")
    ]  # fmt: skip


async def test_an_evaluation_is_a_point_at_its_own_step_also_when_that_step_is_stored_already() -> None:
    store = MemoryStore()
    curves = log(store)
    await curves.step(2, {"loss": 0.5})
    await curves.flush()
    curves.evaluation(EvaluationDone("words", 2, "w", False, 2, 2, 1, 1, 0, {"pass@1": 0.5}))
    await curves.flush()
    assert (2, "evaluation/words/pass@1", 0.5) in written(store)
    assert len(store.list(METRICS)) == 2
    assert last_written(store, RUN) == 2
