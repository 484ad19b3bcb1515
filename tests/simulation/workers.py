"""Worker processes of a simulated world: they take attempts, finish turns, fail, die, and their reports arrive late,
twice, or after their manager is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from gpu.rollout.messages import Dispatch, Ended, Identity, Outcome, PlainEnded, Report, Turn
from storage.payload import TurnRow, VersionSpan
from storage.runs import RunPaths
from tests.simulation import memo
from tests.simulation.incarnations import RUN

if TYPE_CHECKING:
    from tests.simulation.world import World

FAILURES = (Outcome.FAILED, Outcome.ABORTED, Outcome.ENGINE_LOST, Outcome.MALFORMED)
TOKENS, LOGPROBS, MASK = np.array([1, 2], np.int32), np.array([0, -0.5], np.float32), np.array([0, 1], np.int8)


@dataclass
class Running:
    """An attempt in a worker."""

    dispatch: Dispatch
    turn: int = 0
    sample: int = 0
    position: int = 0
    boundary: int = 0


class Workers:
    """`reports` are under way to the manager; `stale` are those whose attempts ended otherwise meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hired = 0
        self._blocks = 0
        self._names: list[str] = []
        self._running: dict[str, list[Running]] = {}
        self._dispatched: set[Identity] = set()
        self.reports: list[Report] = []
        self.stale: list[Report] = []

    # ------------------------------------------------------------------ work

    def work(self) -> bool:
        """One worker takes work, or advances some of its attempts."""
        rng = self._world.rng
        if len(self._names) < 2:
            self._hired += 1
            self._names.append(f"w{self._hired}")
            self._running[self._names[-1]] = []
        name = rng.choice(self._names)
        running = self._running[name]
        if not running or rng.random() < 0.3:
            return self._take(name, running) or self._advance_somebody()
        self.reports.append(self._advance(name, running))
        return True

    def _take(self, name: str, running: list[Running]) -> bool:
        dispatches = self._world.control.take(name, self._world.rng.randint(1, 4))
        for dispatch in dispatches:
            assert dispatch.identity not in self._dispatched, "an attempt is dispatched once"
            self._dispatched.add(dispatch.identity)
            running.append(_start(dispatch))
        return bool(dispatches)

    def _advance_somebody(self) -> bool:
        for name in self._names:
            if self._running[name]:
                self.reports.append(self._advance(name, self._running[name]))
                return True
        return False

    def _advance(self, name: str, running: list[Running]) -> Report:
        world, rng = self._world, self._world.rng
        rows: list[TurnRow] = []
        turns: list[Turn] = []
        ended: list[Ended] = []
        plain: list[PlainEnded] = []
        for run in rng.sample(running, rng.randint(1, len(running))):
            dice = rng.random()
            if run.dispatch.plain is not None:
                running.remove(run)
                plain.append(self._plain(run.dispatch, failed=world.faults and dice < 0.2))
                continue
            if world.faults and dice < 0.2:
                running.remove(run)
                ended.append(Ended(run.dispatch.identity, rng.choice(FAILURES), detail="dice"))
                continue
            version = max(run.dispatch.version, -1 if world.engine_version is None else world.engine_version)
            done = not (world.multi_turn and dice < 0.4 and run.turn < 3)
            rows.append(self._row(run, version, done=done))
            if done:
                running.remove(run)
                ended.append(Ended(run.dispatch.identity, Outcome.SEALED, len(rows) - 1, 1, version, rows[-1].reward,
                                   samples=run.sample + 1))  # fmt: skip
                continue
            before, sample, start = run.turn, run.sample, run.position
            run.turn, run.position, run.boundary = run.turn + 1, run.position + 2, run.boundary + 1
            if (run.dispatch.identity.group + before) % 3 == 0:
                run.sample, run.position = sample + 1, 0
            state = f"{run.sample} {run.position}".encode()
            turns.append(
                Turn(run.dispatch.identity, run.boundary - 1, before, sample, len(rows) - 1, start, 2, version, state)
            )
        return replace(self._report(name, rows, turns, ended), plain=tuple(plain))

    def _plain(self, dispatch: Dispatch, *, failed: bool) -> PlainEnded:
        world = self._world
        if failed:
            return PlainEnded(dispatch.identity, world.rng.choice(FAILURES), detail="dice")
        version = max(dispatch.version, -1 if world.engine_version is None else world.engine_version)
        return PlainEnded(dispatch.identity, Outcome.SEALED, 1, version, version, float(world.rng.random() < 0.5))

    def _row(self, run: Running, version: int, *, done: bool) -> TurnRow:
        identity = run.dispatch.identity
        reward = float(self._world.rng.random() < 0.5)
        span = VersionSpan(identity.incarnation, version, 1)
        return TurnRow(identity.group, identity.sibling, identity.attempt, run.turn, run.sample, run.position,
                       TOKENS, LOGPROBS, MASK, (span,), done, reward, "")  # fmt: skip

    def _report(self, name: str, rows: list[TurnRow], turns: list[Turn], ended: list[Ended]) -> Report:
        """Token rows travel in the report, or are an object of their own before it."""
        world = self._world
        self._blocks += 1
        block = memo.encode_block(f"{world.control.ledger.incarnation}-{name}-{self._blocks}", rows)
        inline: bytes | None = block.data
        if rows and world.rng.random() < world.shape.files:
            world.store.create(RunPaths(RUN).block(block.name), block.data)
            inline = None
        batches = block.batches if inline is None else ()
        return Report(
            name, block.name, block.digest, len(block.data), inline, tuple(turns), tuple(ended), batches=batches
        )  # fmt: skip

    # ------------------------------------------------------------------ reports

    def deliver(self) -> bool:
        """A report arrives, perhaps twice; in any order where attempts have one turn only."""
        if not self.reports:
            return False
        world, rng = self._world, self._world.rng
        report = self.reports.pop(0 if world.multi_turn else rng.randrange(len(self.reports)))
        world.control.report(report)
        if world.faults and rng.random() < 0.2:
            again = world.control.report(report)
            assert again.accepted == 0, "an identical repeat is a no-op"
            world.tally["reports_repeated"] += 1
        return True

    def deliver_late(self) -> None:
        """A report of a lost worker or of a dead incarnation arrives now."""
        accepted = self._world.control.report(self._world.rng.choice(self.stale))
        assert accepted.accepted == 0, "a late result settles nothing"
        self._world.tally["late_reports_refused"] += 1

    # ------------------------------------------------------------------ loss

    def lose_one(self) -> None:
        name = self._world.rng.choice(self._names)
        self._names.remove(name)
        del self._running[name]
        self.stale += [report for report in self.reports if report.worker == name]
        self.reports = [report for report in self.reports if report.worker != name]
        self._world.control.lose_worker(name)
        self._world.tally["workers_lost"] += 1

    def lose_all(self) -> list[Report]:
        """Their manager is gone; returns what was on the way to it."""
        on_the_way, self.reports = self.reports, []
        self.stale += on_the_way
        self._names, self._running = [], {}
        return on_the_way

    @property
    def any(self) -> bool:
        return bool(self._names)


def _start(dispatch: Dispatch) -> Running:
    run = Running(dispatch, boundary=dispatch.boundary)
    if dispatch.continuation is not None:
        run.turn = dispatch.continuation.at.turn + 1
        run.sample, run.position = map(int, dispatch.continuation.at.state.split())
    return run
