"""What attempts do inside their rollouts in the state machine: answers that they act on, requests, exports; and entries
that break the rules of these."""

from __future__ import annotations

import random
from typing import NamedTuple

from msgspec.structs import replace

from gpu.rollout.messages import Answered, Ended, Exported, Intent, Outcome, Progress, Report, Result, Turn
from gpu.rollout.topology import Topology
from storage import schema
from storage.errors import ContinuationInvalid, LedgerInvalid, LineageInvalid, ResourceInvalid, TidegateError
from storage.payload import TurnRow, account_row
from tests.rollout.machine.oracle import RESTART_ONLY
from tests.rollout.machine.workers import Workers, next_sample
from tests.rollout.machine.world import TALLY, Acting, Attempt

BOX = "box"
TOPOLOGY = Topology(modes={BOX: "export_restore", RESTART_ONLY: "restart_only"})
RESOURCES = (BOX, BOX, RESTART_ONLY)
RECORDS: dict[type, type[schema.Record]] = {
    Turn: schema.TurnCommitted, Answered: schema.ModelAnswered, Intent: schema.RequestIntent,
    Result: schema.RequestResult, Exported: schema.ResourceExported,
}  # fmt: skip


def record_of(entry: Progress) -> schema.Record:
    """As the journal would have it, were it allowed."""
    one = entry.identity
    said = {name: getattr(entry, name) for name in entry.__struct_fields__ if name != "identity"}
    said |= {"group": one.group, "sibling": one.sibling, "attempt": one.attempt}
    return RECORDS[type(entry)](**said, **({"block": ""} if isinstance(entry, Turn | Answered) else {}))


class Wrong(NamedTuple):
    """An entry that breaks a rule, and what the journal says to it. `ignored`: in a report it only comes too late."""

    error: type[TidegateError]
    entry: Progress
    ignored: bool = False


class Actions(Workers):
    """A call that had no occasion returns False."""

    # ------------------------------------------------------------------ as it should be

    def act(self, rng: random.Random) -> bool:
        """Some attempts go on with their actions, or begin to."""
        rows: list[TurnRow] = []
        entries: list[Progress] = []
        for attempt in (attempts := self._some(rng, 2)):
            for _ in range(rng.randint(1, 4)):
                self._act(attempt, rng, rows, entries)
        if not attempts:
            return False
        report = self._report(attempts[0].worker, rows, entries, [])
        assert self.control.report(report).accepted == len(entries)
        self.stale.append(report)
        return True

    def _act(self, attempt: Attempt, rng: random.Random, rows: list[TurnRow], entries: list[Progress]) -> None:
        acting, dice = attempt.acting, rng.random()
        if acting is None:
            entries.append(self._answer(attempt, rng, rows))
        elif acting.open is not None:
            entries.append(self._result(attempt, acting, rng))
        elif dice < 0.25:
            entries.append(self._read(attempt, acting, rng))
        elif dice < 0.7:
            entries.append(self._intend(attempt, acting, rng))
        else:
            entries += self._exports(attempt, rng)
            entries.append(self._end_turn(attempt, acting, rng, rows))

    def _answer(self, attempt: Attempt, rng: random.Random, rows: list[TurnRow]) -> Answered:
        version, sample = self._version(attempt, rng), next_sample(attempt, rng)
        call = self._row(attempt, sample, version, 0.0, done=False)
        rows.append(call)
        made = Answered(
            attempt.identity, attempt.boundary, call.turn, sample, len(rows) - 1, call.start, len(call.tokens), version
        )
        attempt.acting = Acting(attempt.boundary, call)
        attempt.samples.append(sample)
        attempt.boundary += 1
        return made

    def _intend(self, attempt: Attempt, acting: Acting, rng: random.Random) -> Intent:
        resource = rng.choice(RESOURCES)
        acting.open = Intent(attempt.identity, acting.boundary, acting.cursor, resource,
                             attempt.revisions.get(resource, 0), f"input {rng.random()}")  # fmt: skip
        acting.cursor += 1
        return acting.open

    def _result(self, attempt: Attempt, acting: Acting, rng: random.Random) -> Result:
        assert acting.open is not None
        result = self.replied(acting.open, changed=rng.random() < 0.7)
        if result.revision:
            attempt.revisions[result.resource] = result.revision
        acting.open = None
        return result

    def _read(self, attempt: Attempt, acting: Acting, rng: random.Random) -> Result:
        resource = rng.choice(RESOURCES)
        acting.cursor += 1
        return Result(attempt.identity, acting.boundary, acting.cursor - 1, resource,
                      attempt.revisions.get(resource, 0), "look", b"this")  # fmt: skip

    def _exports(self, attempt: Attempt, rng: random.Random) -> list[Progress]:
        revision = attempt.revisions.get(BOX, 0)
        if revision == attempt.exported.get(BOX, 0) or rng.random() < 0.2:
            return []
        attempt.exported[BOX] = revision
        return [Exported(attempt.identity, BOX, revision, b"all of it")]

    def _end_turn(self, attempt: Attempt, acting: Acting, rng: random.Random, rows: list[TurnRow]) -> Turn:
        told, call = rng.random() < 0.5, acting.call
        if told:
            rows.append(account_row(call, attempt.identity.attempt, done=False, reward=0.0, record="seen"))
        attempt.acting = None
        attempt.boundary += 1
        return self._turn(attempt, acting, len(rows) - 1 if told else -1, tokens=0)

    def _turn(self, attempt: Attempt, acting: Acting, row: int, tokens: int) -> Turn:
        call = acting.call
        return Turn(attempt.identity, max(attempt.boundary - 1, acting.boundary + 1), call.turn, call.sample, row,
                    call.start + len(call.tokens), tokens, call.oldest, b"state", dict(attempt.revisions))  # fmt: skip

    # ------------------------------------------------------------------ as it must not be

    def act_wrongly(self, rng: random.Random) -> bool:
        """The journal refuses each of the entries; reported, one ends its attempt, or comes too late and changes
        nothing."""
        attempts = [attempt for attempt in self.running if attempt.samples]
        if not attempts:
            return False
        attempt = rng.choice(attempts)
        wrongs = self._wrongs(attempt)
        for what, wrong in wrongs.items():
            record = record_of(wrong.entry)
            self.refuse(what, wrong.error, lambda record=record: self.control.books.record(record))
        what, wrong = rng.choice([*wrongs.items()])
        report = self._wrong_report(attempt, wrong.entry)
        if not wrong.ignored:
            self._report_wrong(attempt, report, rng)
            TALLY[f"malformed: {what}"] += 1
            return True
        with self.unchanged(f"reported {what}"):
            assert self.control.report(report).accepted == 0
        return True

    def _wrong_report(self, attempt: Attempt, entry: Progress) -> Report:
        named = isinstance(entry, Turn | Answered) and entry.row >= 0
        rows = [self._row(attempt, 0, attempt.dispatch.version, 0.0, done=False)] if named else []
        return self._report(attempt.worker, rows, [entry], [])

    def _report_wrong(self, attempt: Attempt, report: Report, rng: random.Random) -> None:
        malformed = self.oracle.tally["attempt_abandoned malformed"]
        assert self.control.report(report).accepted == 1
        self._end([attempt])
        self._end_with_their_groups([attempt], rng)
        self.follow()
        assert self.oracle.tally["attempt_abandoned malformed"] == malformed + 1

    def _wrongs(self, attempt: Attempt) -> dict[str, Wrong]:
        found = {"export of another revision": Wrong(ResourceInvalid, self._wrong_export(attempt))}
        acting = attempt.acting
        if acting is None:
            return found | self._wrong_between_turns(attempt)
        turn = self._turn(attempt, acting, -1, tokens=0)
        found |= {
            "turn of an older boundary": Wrong(ContinuationInvalid, _with(turn, boundary=acting.boundary), True),
            "tokens for an answer that has them": Wrong(ContinuationInvalid, _with(turn, tokens=2)),
            "turn that is not the answer's": Wrong(ContinuationInvalid, _with(turn, turn=turn.turn + 1)),
        }
        return found | (self._wrong_while_open(attempt, acting) if acting.open else self._wrong_next(attempt, acting))

    def _wrong_export(self, attempt: Attempt) -> Exported:
        return Exported(attempt.identity, BOX, attempt.revisions.get(BOX, 0) + 1, b"of tomorrow")

    def _wrong_between_turns(self, attempt: Attempt) -> dict[str, Wrong]:
        last, identity = attempt.boundary - 1, attempt.identity
        box = attempt.revisions.get(BOX, 0)
        intent, result = (identity, last, 0, BOX, box, "input"), (identity, last, 0, BOX, box, "look", b"this")
        # Tokens of a turn are named by position, so a row that is none of anybody's is enough here.
        turn = Turn(identity, last + 1, len(attempt.samples), attempt.samples[-1], 0,
                    2 * attempt.samples.count(attempt.samples[-1]), 2, self._oldest(attempt), b"",
                    dict(attempt.revisions))  # fmt: skip
        return {
            "intent without an answer": Wrong(ContinuationInvalid, Intent(*intent)),
            "result without an answer": Wrong(ContinuationInvalid, Result(*result)),
            "intent of an older answer": Wrong(ContinuationInvalid, Intent(identity, last - 1, *intent[2:]), True),
            "boundary that was": Wrong(ContinuationInvalid, _with(turn, boundary=last), True),
            "boundary that is left out": Wrong(ContinuationInvalid, _with(turn, boundary=last + 2), True),
            "tokens that begin elsewhere": Wrong(LineageInvalid, _with(turn, start=turn.start + 1)),
        }

    def _wrong_while_open(self, attempt: Attempt, acting: Acting) -> dict[str, Wrong]:
        asked = acting.open
        assert asked is not None
        result = self.replied(asked, changed=True)
        again = _with(asked, cursor=asked.cursor + 1)
        turn = self._turn(attempt, acting, -1, tokens=0)
        return {
            "intent while another is open": Wrong(ResourceInvalid, again),
            "intent that was": Wrong(ResourceInvalid, _with(asked, digest="other input"), True),
            "result of another input": Wrong(ResourceInvalid, _with(result, digest="other input")),
            "result of another resource": Wrong(ResourceInvalid, _with(result, resource="other")),
            "two changes at once": Wrong(ResourceInvalid, _with(result, revision=asked.revision + 2)),
            "result before its turn": Wrong(ContinuationInvalid, _with(result, cursor=asked.cursor + 1)),
            "turn with an open request": Wrong(ResourceInvalid, turn),
        }

    def _wrong_next(self, attempt: Attempt, acting: Acting) -> dict[str, Wrong]:
        box = attempt.revisions.get(BOX, 0)
        intent = Intent(attempt.identity, acting.boundary, acting.cursor, BOX, box, "input")
        read = Result(attempt.identity, acting.boundary, acting.cursor, BOX, box, "look", b"this")
        turn = self._turn(attempt, acting, -1, tokens=0)
        return {
            "intent of another revision": Wrong(ResourceInvalid, _with(intent, revision=box + 1)),
            "action that is left out": Wrong(ContinuationInvalid, _with(intent, cursor=acting.cursor + 1)),
            "change without an intent": Wrong(ResourceInvalid, _with(read, revision=box + 1)),
            "turn of other revisions": Wrong(ResourceInvalid, _with(turn, revisions={BOX: box + 1})),
        }

    def seal_with_an_open_request(self, rng: random.Random) -> bool:
        """Nobody knows what became of it, so it is no result."""
        attempts = [attempt for attempt in self.running if attempt.acting]
        if not attempts:
            return False
        attempt = rng.choice(attempts)
        acting = attempt.acting
        assert acting is not None
        entries = [] if acting.open else [self._intend(attempt, acting, rng)]
        assert self.control.report(self._report(attempt.worker, [], [*entries], [])).accepted == len(entries)
        call = acting.call
        ended = Ended(attempt.identity, Outcome.SEALED, 0, 1, call.oldest, 1.0, samples=call.sample + 1)
        self._report_wrong(attempt, Report(attempt.worker, "bad", "", 0, None, (), (ended,)), rng)
        TALLY["malformed: seal with an open request"] += 1
        return True

    def discard_wrongly(self, rng: random.Random) -> bool:
        """Only turns that nobody works on can be given up."""
        slots = [
            (ordinal, sibling, slot)
            for ordinal, group in self.oracle.groups.items()
            for sibling, slot in enumerate(group.slots)
            if slot.live or slot.sealed or not slot.turns
        ]
        if not slots or self.oracle.finished:
            return False
        ordinal, sibling, slot = rng.choice(slots)
        where = "a live rollout" if slot.live else "a result" if slot.sealed else "a rollout without turns"
        discarded = schema.ContinuationDiscarded((ordinal,), (sibling,), "because")
        self.refuse(f"discard of {where}", LedgerInvalid, lambda: self.control.books.record(discarded))
        return True


def _with(entry: Progress, **changes: object) -> Progress:
    return replace(entry, **changes)
