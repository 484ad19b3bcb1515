"""A run's curves as TensorBoard events below its own folder, on whatever store the run is.

The events of some steps become one immutable object, named by its last step: nothing is appended to, so every store
will do. What a driver that died had not written comes from the journal, where each step's metrics are anyway.
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# (protobuf makes its classes at import)

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from storage.errors import TidegateError
from storage.filesystem import Store
from storage.inspection import evaluations, reverts
from storage.inspection import steps as committed_steps
from storage.runs import RunPaths
from storage.schema import EvaluationDone

FILE_VERSION = "brain.Event:2"
EVERY_S = 30.0
KEPT = 10_000
"""Points that are kept for a store that is away; older ones come from the journal at the next start."""
FIGURES_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """The scalars of one step; `time` is Unix seconds."""

    step: int
    time: float
    values: Mapping[str, float]


def event_file(points: list[Point]) -> bytes:
    """A TensorBoard event file with these points."""
    out = io.BytesIO()
    writer = RecordWriter(out)
    writer.write(Event(wall_time=points[0].time, file_version=FILE_VERSION).SerializeToString())
    for point in points:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        event = Event(wall_time=point.time, step=point.step, summary=Summary(value=values))
        writer.write(event.SerializeToString())
    writer.flush()
    return out.getvalue()


def last_written(store: Store, run: str) -> int:
    """The last step whose points are stored, 0 when none are. Points of steps that were reverted later do not count."""
    names = [key.rpartition("/")[2].split(".") for key in store.list(RunPaths(run).metrics)]
    files = [
        (int(name[3]), int(name[4].partition("-")[0])) for name in names if name[:3] == ["events", "out", "tfevents"]
    ]
    taken_back = reverts(store, run) if files else []
    return max([min([last, *[to for by, to in taken_back if by > of]]) for last, of in files], default=0)


class MetricsLog:
    """One driver's writer. `driver` tells drivers of a run apart, in file names only. Curves are for people: a store
    that does not take them is warned about, and no reason to stop."""

    def __init__(self, store: Store, run: str, driver: str, manager: Any) -> None:
        self._store, self._run, self._driver, self._manager = store, run, driver, manager
        self._points: list[Point] = []
        self._flushed = time.monotonic()
        self._asked = -FIGURES_EVERY_S
        self._files = 0

    async def backfill(self) -> int:
        """Points of committed steps that no driver has written; returns how many there were."""
        self._points += await asyncio.to_thread(self._missing)
        return len(self._points)

    def _missing(self) -> list[Point]:
        last = last_written(self._store, self._run)
        steps = [_of_journal(entry) for entry in committed_steps(self._store, self._run) if entry["step"] > last]
        found = evaluations(self._store, self._run)
        return steps + [_of_suite(one["suite"], one, one["metrics"]) for one in found if one["step"] > last]

    async def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer's metrics of a step and, at most once a second, the figures of rollout control."""
        values = {f"train/{name}": value for name, value in metrics.items() if name != "step"}
        if time.monotonic() - self._asked >= FIGURES_EVERY_S:
            self._asked = time.monotonic()
            values |= {f"rollout/{name}": value for name, value in (await self._manager.metrics()).items()}
        self._points.append(Point(step, time.time(), values))
        if time.monotonic() - self._flushed >= EVERY_S:
            await self.flush()

    def evaluation(self, done: EvaluationDone) -> None:
        """An evaluation's result, at the step whose weights it measured."""
        self._points.append(_of_suite(done.suite, {"step": done.step, "time": time.time()}, done.metrics))

    async def flush(self) -> None:
        """Store what has come since the last time."""
        self._flushed = time.monotonic()
        points, self._points = self._points, []
        if not points:
            return
        self._files += 1
        last = max(point.step for point in points)
        name = f"events.out.tfevents.{last:010d}.{self._driver}.{self._files:06d}"
        data = await asyncio.to_thread(event_file, points)
        try:
            await asyncio.to_thread(self._store.create, f"{RunPaths(self._run).metrics}/{name}", data)
        except TidegateError as error:
            log.warning("op=metrics run=%s decision=try_with_the_next reason=%s", self._run, error)
            self._points = [*points, *self._points][-KEPT:]


def _of_suite(suite: str, at: Mapping[str, Any], metrics: Mapping[str, float]) -> Point:
    return Point(at["step"], at["time"], {f"evaluation/{suite}/{name}": value for name, value in metrics.items()})


def _of_journal(entry: Mapping[str, Any]) -> Point:
    values = {f"train/{name}": value for name, value in entry.items() if name not in ("step", "time")}
    return Point(entry["step"], entry["time"], {name: v for name, v in values.items() if isinstance(v, int | float)})
