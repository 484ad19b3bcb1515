"""Worker processes of a simulated world: they take attempts, finish turns, fail, die, and their reports arrive late,
twice, or after their manager is gone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from gpu.rollout.messages import Accepted, Dispatch, Ended, Identity, Outcome, PlainEnded, Progress, Report, Turn
from storage.payload import TurnRow, VersionSpan, account_row
from storage.runs import RunPaths
from tests.simulation import memo
from tests.simulation.actors import LOST, Actor, Ending
from tests.simulation.incarnations import RUN, Incarnation

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
    done: bool = False
    actor: Actor | None = None

    def go_on(self, turn: int, sample: int, start: int) -> bytes:
        """After a turn, to the next one; the state from which another attempt does that."""
        self.turn, self.position, self.boundary = turn + 1, start + 2, self.boundary + 1
        if (self.dispatch.identity.group + turn) % 3 == 0:
            self.sample, self.position = sample + 1, 0
        return f"{self.sample} {self.position}".encode()


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
        return self._report_of(name, running)

    def _report_of(self, name: str, running: list[Running]) -> bool:
        report = self._advance(name, running)
        if self._world.actors.acting and not (report.turns or report.ended or report.plain):
            return False  # they wait
        self.reports.append(report)
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
                return self._report_of(name, self._running[name])
        return False

    def _advance(self, name: str, running: list[Running]) -> Report:
        world, rng = self._world, self._world.rng
        rows: list[TurnRow] = []
        turns: list[Progress] = []
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
                world.actors.die([run], None)
                ended.append(Ended(run.dispatch.identity, rng.choice(FAILURES), detail="dice"))
                continue
            if world.actors.acting:
                if (end := self._act(name, run, rows, turns)) is not None:
                    running.remove(run)
                    ended.append(end)
                continue
            version = self._version(run)
            done = not (world.multi_turn and dice < 0.4 and run.turn < 3)
            rows.append(self._row(run, version, done=done))
            if done:
                running.remove(run)
                ended.append(Ended(run.dispatch.identity, Outcome.SEALED, len(rows) - 1, 1, version, rows[-1].reward,
                                   samples=run.sample + 1))  # fmt: skip
                continue
            before, sample, start = run.turn, run.sample, run.position
            state = run.go_on(before, sample, start)
            turns.append(
                Turn(run.dispatch.identity, run.boundary - 1, before, sample, len(rows) - 1, start, 2, version, state)
            )
        return replace(self._report(name, rows, turns, ended), plain=tuple(plain))

    def _version(self, run: Running) -> int:
        serving = self._world.engine_version
        return max(run.dispatch.version, -1 if serving is None else serving)

    # ------------------------------------------------------------------ attempts that act

    def _act(self, name: str, run: Running, rows: list[TurnRow], turns: list[Progress]) -> Ended | None:
        """An attempt goes on to where it has to wait; its end, when it came to it."""
        actor = run.actor = run.actor or Actor(self._world.actors, run, name)
        if not actor.busy:
            wrong = self._world.faults and self._world.rng.random() < 0.02
            call = actor.pending or self._row(run, self._version(run) - wrong, done=False)
            run.turn, run.sample, run.position = call.turn, call.sample, call.start
            run.done = not (self._world.rng.random() < 0.5 and run.turn < 3)
            actor.begin(call, done=run.done)
        try:
            ending = actor.go_on()
        except LOST as error:
            self._put(actor, rows, turns)
            self._world.tally["attempts_not_continuable"] += 1
            return Ended(run.dispatch.identity, Outcome.NOT_CONTINUABLE, detail=str(error))
        if ending is not None and not run.done:
            actor.exported(ending.exports)
        self._put(actor, rows, turns)
        if ending is None:
            return None
        return self._seal(run, actor, ending, rows) if run.done else self._turn(run, ending, rows, turns)

    def _put(self, actor: Actor, rows: list[TurnRow], turns: list[Progress]) -> None:
        for row, entry in actor.out:
            if row is not None:
                rows.append(row)
                entry = replace(entry, row=len(rows) - 1)
            turns.append(entry)
        actor.out = []

    def _seal(self, run: Running, actor: Actor, ending: Ending, rows: list[TurnRow]) -> Ended:
        """As the worker does it: the end is reported, and the sessions go."""
        call, identity, reward = ending.call, run.dispatch.identity, float(self._world.rng.random() < 0.5)
        if ending.acted:
            rows.append(account_row(call, identity.attempt, done=True, reward=reward, record=""))
        else:
            rows.append(dataclasses.replace(call, done=True, reward=reward))
        actor.seal()
        return Ended(identity, Outcome.SEALED, len(rows) - 1, 1, call.oldest, reward, samples=call.sample + 1)

    def _turn(self, run: Running, ending: Ending, rows: list[TurnRow], turns: list[Progress]) -> None:
        call, identity = ending.call, run.dispatch.identity
        start, tokens, row = call.start, len(call.tokens), call
        if ending.acted:
            start, tokens = call.start + len(call.tokens), 0
            told = self._world.rng.random() < 0.5
            row = account_row(call, identity.attempt, done=False, reward=0.0, record="{}") if told else None
        if row is not None:
            rows.append(row)
        state = run.go_on(call.turn, call.sample, call.start)
        turns.append(
            Turn(identity, run.boundary - 1, call.turn, call.sample, len(rows) - 1 if row is not None else -1, start,
                 tokens, call.oldest, state, ending.revisions)
        )  # fmt: skip

    # ------------------------------------------------------------------ what they say

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

    def _report(self, name: str, rows: list[TurnRow], turns: list[Progress], ended: list[Ended]) -> Report:
        """Token rows travel in the report, or are an object of their own before it."""
        world = self._world
        if world.actors.acting and not rows:
            return Report(name, "", "", 0, None, tuple(turns), tuple(ended))
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
        accepted = world.control.report(report)
        if world.actors.acting:
            self._told(report, accepted)
        if world.faults and rng.random() < 0.2:
            again = world.control.report(report)
            assert again.accepted == 0, "an identical repeat is a no-op"
            world.tally["reports_repeated"] += 1
        return True

    def _told(self, report: Report, accepted: Accepted) -> None:
        running = self._running.get(report.worker, [])
        for run in self._world.actors.told(report, accepted, running):
            running.remove(run)
            self._world.actors.die([run], None)
            self._world.tally["attempts_stopped"] += 1

    def deliver_late(self) -> None:
        """A report of a lost worker or of a dead incarnation arrives now."""
        accepted = self._world.control.report(self._world.rng.choice(self.stale))
        assert accepted.accepted == 0, "a late result settles nothing"
        self._world.tally["late_reports_refused"] += 1

    # ------------------------------------------------------------------ loss

    def lose_one(self) -> None:
        name = self._world.rng.choice(self._names)
        self._names.remove(name)
        self._world.actors.die(self._running.pop(name), None)
        self.stale += [report for report in self.reports if report.worker == name]
        self.reports = [report for report in self.reports if report.worker != name]
        self._world.control.lose_worker(name)
        self._world.tally["workers_lost"] += 1

    def lose_all(self, alive: Incarnation | None) -> list[Report]:
        """Their manager is gone, or stopped and `alive`; returns what was on the way to it."""
        on_the_way, self.reports = self.reports, []
        self.stale += on_the_way
        self._world.actors.die([run for runs in self._running.values() for run in runs], alive)
        self._names, self._running = [], {}
        return on_the_way

    @property
    def any(self) -> bool:
        return bool(self._names)


def _start(dispatch: Dispatch) -> Running:
    run = Running(dispatch, boundary=dispatch.boundary)
    if dispatch.continuation is not None and not dispatch.continuation.at.pending:
        run.turn = dispatch.continuation.at.turn + 1
        run.sample, run.position = map(int, dispatch.continuation.at.state.split())
    return run
