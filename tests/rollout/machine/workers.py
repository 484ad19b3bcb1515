"""What workers do in the state machine: take attempts, finish turns, end them well or badly, come late, die."""

from __future__ import annotations

import random
from dataclasses import replace

from gpu.rollout.messages import (
    Continuation,
    Ended,
    Identity,
    Intent,
    Outcome,
    PlainEnded,
    Progress,
    Report,
    Result,
    Turn,
)
from storage.payload import TurnRow, account_row, encode_block
from storage.reader import PayloadReader
from tests.rollout.building import RUN
from tests.rollout.machine.world import TALLY, Acting, Attempt, World

WORKERS = ("a", "b")
FAILURES = (Outcome.FAILED, Outcome.MALFORMED, Outcome.ABORTED, Outcome.ENGINE_LOST, Outcome.NOT_CONTINUABLE)
BAD = ("nan", "infinite", "no tokens", "no row", "older", "unknown", "newer")


def next_sample(attempt: Attempt, rng: random.Random) -> int:
    """The sample that its next turn belongs to: the open one, or another."""
    last = attempt.samples[-1] if attempt.samples else -1
    return max(0, last + (rng.random() < 0.3))


class Workers(World):
    """A call that had no occasion returns False."""

    def take(self, rng: random.Random) -> bool:
        return self._take(rng.choice(WORKERS), rng.choice([0, 1, 3, 100, 100]))

    def _take(self, worker: str, limit: int) -> bool:
        given_up = self.oracle.tally["continuation_discarded"]
        taken = self.control.take(worker, limit)
        self.follow()
        TALLY["given up at a mint"] += self.oracle.tally["continuation_discarded"] - given_up
        assert len(taken) <= limit
        for dispatch in taken:
            identity, continuation = dispatch.identity, dispatch.continuation
            assert identity not in self.handed, "an attempt is handed out once"
            self.handed.add(identity)
            if dispatch.plain is not None:
                self.plain[identity] = worker
                continue
            assert identity in self.oracle.live
            slot = self.oracle.groups[identity.group].slots[identity.sibling]
            assert (continuation.at.turn + 1 if continuation else 0) == slot.turns, "on from the last durable turn"
            attempt = Attempt(dispatch, worker, dispatch.boundary, list(slot.samples))
            if continuation is not None:
                self._go_on(attempt, continuation)
            self.running.append(attempt)
        return bool(taken)

    def _go_on(self, attempt: Attempt, continuation: Continuation) -> None:
        """What an attempt can know of the one before it."""
        rows = PayloadReader(self.bench.store, RUN, continuation.hot.get).rows(continuation.rows, continuation.blocks)
        at = continuation.at
        names = {*(at.revisions or {}), *(request.resource for request in at.requests)}
        attempt.revisions = {name: revision for name in names if (revision := at.revision(name))}
        attempt.exported = {name: export.revision for name, export in at.exports.items()}
        if at.pending:
            assert not rows[-1].is_account, "the answer's tokens come last"
            attempt.acting = acting = Acting(at.index, rows[-1], len(at.requests))
            if at.requests and at.requests[-1].reply is None:
                asked = at.requests[-1]
                acting.open = Intent(
                    attempt.identity, at.index, acting.cursor - 1, asked.resource, asked.before, asked.digest
                )

    def _some(self, rng: random.Random, most: int) -> list[Attempt]:
        """Some attempts of one worker, in any order."""
        mine = self._of(rng.choice(self.running).worker) if self.running else []
        return rng.sample(mine, min(len(mine), rng.randint(1, most)))

    def _of(self, worker: str) -> list[Attempt]:
        return [attempt for attempt in self.running if attempt.worker == worker]

    def _version(self, attempt: Attempt, rng: random.Random) -> int:
        """One that may have generated now: served at the dispatch, or since."""
        return rng.choice([attempt.dispatch.version, max(attempt.dispatch.version, self.serving or 0)])

    def _report(self, worker: str, rows: list[TurnRow], turns: list[Progress], ended: list[Ended]) -> Report:
        if not rows:
            return Report(worker, "", "", 0, None, tuple(turns), tuple(ended))
        self.bench.blocks += 1
        block = encode_block(f"{self.oracle.incarnation}-{self.bench.blocks}", rows)
        return Report(worker, block.name, block.digest, len(block.data), block.data, tuple(turns), tuple(ended))

    def _sealed(self, attempts: list[Attempt], rng: random.Random) -> Report:
        rows: list[TurnRow] = []
        turns: list[Progress] = []
        ended: list[Ended] = []
        for number, attempt in enumerate(attempts):
            reward = float(rng.random() < 0.5)
            if attempt.acting is None:
                version, sample = self._version(attempt, rng), next_sample(attempt, rng)
                rows.append(self._row(attempt, sample, version, reward, done=True))
            else:
                if attempt.acting.open is not None:
                    turns.append(self.replied(attempt.acting.open, changed=rng.random() < 0.7))
                call = attempt.acting.call
                version, sample = call.oldest, call.sample
                rows.append(account_row(call, attempt.identity.attempt, done=True, reward=reward, record="seen"))
            ended.append(Ended(attempt.identity, Outcome.SEALED, number, 1, version, reward, samples=sample + 1))
        return self._report(attempts[0].worker, rows, turns, ended)

    @staticmethod
    def replied(asked: Intent, *, changed: bool) -> Result:
        """The result of what was intended."""
        return Result(asked.identity, asked.boundary, asked.cursor, asked.resource, asked.revision + changed,
                      asked.digest, b"done" if changed else b"refused")  # fmt: skip

    def _row(self, attempt: Attempt, sample: int, version: int, reward: float, *, done: bool) -> TurnRow:
        row = self.bench.row(attempt.dispatch, len(attempt.samples), version, reward, done=done)
        return replace(row, sample=sample, start=2 * attempt.samples.count(sample))

    def _end(self, attempts: list[Attempt]) -> None:
        self.running = [attempt for attempt in self.running if attempt not in attempts]

    def seal(self, rng: random.Random) -> bool:
        return self._seal(self._some(rng, rng.choice([1, 3, 100])), rng)

    def _seal(self, attempts: list[Attempt], rng: random.Random) -> bool:
        if not attempts:
            return False
        report = self._sealed(attempts, rng)
        accepted = self.control.report(report)
        assert (accepted.accepted, accepted.ignored) == (len(report.turns) + len(attempts), 0)
        self._end(attempts)
        self.unpublished.update(dict.fromkeys((a.identity for a in attempts), self.bench.writer.last_seq))
        self.stale.append(report)
        return True

    def turn(self, rng: random.Random) -> bool:
        rows: list[TurnRow] = []
        turns: list[Progress] = []
        attempts = [attempt for attempt in self._some(rng, 3) if attempt.acting is None]
        for row, attempt in enumerate(attempts):
            version, sample = self._version(attempt, rng), next_sample(attempt, rng)
            rows.append(self._row(attempt, sample, version, 0.0, done=False))
            start = 2 * attempt.samples.count(sample)
            turns.append(
                Turn(attempt.identity, attempt.boundary, len(attempt.samples), sample, row, start, 2, version, b"state",
                     dict(attempt.revisions))
            )  # fmt: skip
            attempt.samples.append(sample)
            attempt.boundary += 1
        if attempts:
            report = self._report(attempts[0].worker, rows, turns, [])
            assert self.control.report(report).accepted == len(turns)
            self.stale.append(report)
        return bool(attempts)

    def fail(self, rng: random.Random) -> bool:
        if not (attempts := self._some(rng, 2)):
            return False
        late, outcome = self._sealed(attempts, rng), rng.choice(FAILURES)
        ended = tuple(Ended(attempt.identity, outcome, detail="boom") for attempt in attempts)
        report = Report(attempts[0].worker, "", "", 0, None, (), ended)
        assert self.control.report(report).accepted == len(attempts)
        self._end(attempts)
        self._end_with_their_groups(attempts, rng)
        self.stale += [report, late]
        return True

    def _end_with_their_groups(self, attempts: list[Attempt], rng: random.Random) -> None:
        """Attempts whose group is redone whole because of these: they go on and come too late."""
        lost = {attempt.identity.group for attempt in attempts}
        for attempt in [attempt for attempt in self.running if attempt.identity.group in lost]:
            if attempt.identity not in self.live_now():
                self.stale.append(self._sealed([attempt], rng))
                self._end([attempt])

    def _oldest(self, attempt: Attempt) -> int:
        """Of all its durable turns."""
        return min(self.oracle.groups[attempt.identity.group].slots[attempt.identity.sibling].versions)

    def live_now(self) -> set[Identity]:
        self.see()
        return self.oracle.live

    def break_a_rule(self, rng: random.Random) -> bool:
        """A result that breaks a rule ends its attempt and is no result."""
        for attempt in (attempts := self._some(rng, 1)):
            version = attempt.dispatch.version if attempt.acting is None else self._oldest(attempt)
            row, tokens, oldest, reward = {
                "nan": (0, 1, version, float("nan")),
                "infinite": (0, 1, version, float("-inf")),
                "no tokens": (0, 0, version, 1.0),
                "no row": (-1, 1, version, 1.0),
                "older": (0, 1, version - 1, 1.0),
                "unknown": (0, 1, -1, 1.0),
                "newer": (0, 1, self.oracle.step + 1, 1.0),
            }[rng.choice(BAD)]
            ended = Ended(attempt.identity, Outcome.SEALED, row, tokens, oldest, reward)
            malformed = self.oracle.tally["attempt_abandoned malformed"]
            assert self.control.report(Report(attempt.worker, "bad", "", 0, None, (), (ended,))).accepted == 1
            self._end([attempt])
            self._end_with_their_groups([attempt], rng)
            self.follow()
            assert self.oracle.tally["attempt_abandoned malformed"] == malformed + 1
        return bool(attempts)

    def come_late(self, rng: random.Random) -> None:
        """Repeated, of an older attempt, of a lost worker, of another incarnation."""
        for report in rng.sample(self.stale[-12:], min(1, len(self.stale))):
            with self.unchanged("late report"):
                accepted = self.control.report(report)
            assert (accepted.accepted, accepted.ignored) == (0, len(report.turns + report.ended + report.plain))

    def lose_a_worker(self, rng: random.Random) -> bool:
        worker = rng.choice(WORKERS)
        mine = self._of(worker)
        plain = [identity for identity, owner in self.plain.items() if owner == worker]
        self._forget(rng, [worker])
        assert self.control.lose_worker(worker) == len(mine) + len(plain)
        self._end_with_their_groups(mine, rng)
        return bool(mine)

    def _forget(self, rng: random.Random, workers: list[str]) -> None:
        """What these workers were doing is finished all the same, and reported when it counts no more."""
        for worker in workers:
            if mine := self._of(worker):
                self.stale.append(self._sealed(mine, rng))
                self._end(mine)
            if plain := [identity for identity, owner in self.plain.items() if owner == worker]:
                ended = tuple(PlainEnded(identity, Outcome.SEALED, 1, 0, 0, 1.0) for identity in plain)
                self.stale.append(Report(worker, "", "", 0, None, (), (), ended))
                self.plain = {identity: owner for identity, owner in self.plain.items() if owner != worker}

    # ------------------------------------------------------------------ evaluations and verdicts

    def end_plain(self, rng: random.Random) -> bool:
        """Rollouts of an evaluation end, well or badly."""
        some = rng.sample([*self.plain], min(len(self.plain), rng.randint(1, 3)))
        if not some:
            return False
        outcome = rng.choice([Outcome.SEALED, Outcome.SEALED, *FAILURES])
        reward = rng.choice([1.0, 0.0, float("nan")])
        newest = rng.randint(0, self.oracle.step if self.serving is None else self.serving)
        ended = tuple(PlainEnded(identity, outcome, 1, 0, newest, reward) for identity in some)
        report = Report(self.plain[some[0]], "", "", 0, None, (), (), ended)
        assert self.control.report(report).accepted == len(some)
        for identity in some:
            del self.plain[identity]
        self.stale.append(report)
        return True

    def begin_judging(self, rng: random.Random) -> None:
        """Group-level work begins, where it is done outside."""
        begun = dict(self.control.results.begin_judging())
        assert not begun.keys() & self.judged.keys(), "one at a time for each group"
        self.judged.update(begun)

    def judge(self, rng: random.Random) -> bool:
        """A verdict comes in, or the work raises, in any order."""
        if not self.judged:
            return False
        ordinal = rng.choice([*self.judged])
        rewards = self.judged.pop(ordinal)
        results, reason = self.control.results, self.bench.group_filter(rewards)
        if rng.random() < 0.3:
            results.judging_failed(ordinal, ValueError("boom"))
        else:
            results.judge(ordinal, reason)
            self.follow()
        with self.unchanged("late verdict"):
            results.judge(ordinal, "late")
        return True
