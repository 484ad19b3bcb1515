"""One rollout as its records tell it: attempts, turns, answers that are acted on, requests, exports.

Stated without the ledger: what a rollout did since it last started from scratch, and what it may do next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from storage import schema
from storage.ledger import Boundary

LOSSES = ("worker_lost", "engine_lost", "not_continuable")


@dataclass
class Asked:
    """A request, at `revision` when it was asked; `reply` is None until it is known."""

    resource: str
    digest: str
    revision: int
    reply: bytes | None = None


@dataclass
class Slot:
    """A rollout. `versions` are the oldest versions of the turns that are kept, `samples` the output samples that they
    belong to; `root` is the attempt with which they begin. `answer` is the boundary of an answer that is being acted
    on, -1 between turns; `asked` its requests. `boundaries` and `intents` are never taken back."""

    attempt: int = -1
    incarnation: int = 0
    live: bool = False
    sealed: bool = False
    minted: int = -1
    versions: list[int] = field(default_factory=lambda: list[int]())
    samples: list[int] = field(default_factory=lambda: list[int]())
    tokens: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    failures: int = 0
    losses: int = 0
    root: int = -1
    unfit: bool = False
    """The last attempt could not go on from these turns."""
    boundaries: list[int] = field(default_factory=lambda: list[int]())
    answer: int = -1
    asked: list[Asked] = field(default_factory=lambda: list[Asked]())
    revisions: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    exports: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    intents: dict[tuple[int, int, int], str] = field(default_factory=lambda: dict[tuple[int, int, int], str]())
    """(root, boundary, cursor) -> digest."""
    asked_by: int = -1
    """The attempt of the newest intent."""
    results: set[tuple[int, int, int]] = field(default_factory=lambda: set[tuple[int, int, int]]())

    @property
    def turns(self) -> int:
        return len(self.versions)

    @property
    def last(self) -> int:
        return self.boundaries[-1] if self.boundaries else -1

    @property
    def open(self) -> Asked | None:
        return self.asked[-1] if self.asked and self.asked[-1].reply is None else None

    def uses(self, resource: str) -> bool:
        """Whether it has changed the resource, or may have."""
        return bool(self.revisions.get(resource)) or (self.open is not None and self.open.resource == resource)

    # ------------------------------------------------------------------ attempts

    def start(self, attempt: int, incarnation: int, version: int) -> None:
        self.attempt, self.incarnation, self.live, self.minted = attempt, incarnation, True, version
        self.unfit = False
        if not self.turns:
            self.root = attempt

    def abandon(self, reason: str) -> None:
        self.live, self.unfit = False, reason == "not_continuable"
        self.losses += reason in LOSSES
        self.failures += reason not in (*LOSSES, "sibling_ended")

    def drop(self) -> None:
        """Its turns are gone; what it has used up is not."""
        self.sealed, self.versions, self.samples, self.tokens = False, [], [], {}
        self.answer, self.asked, self.revisions, self.exports, self.unfit = -1, [], {}, {}, False

    def again(self) -> Slot:
        """The same rollout when its group starts over, after it was settled."""
        return Slot(self.attempt, boundaries=self.boundaries, intents=self.intents, results=self.results)

    # ------------------------------------------------------------------ turns

    def _generated(self, oldest: int, sample: int, newest: int) -> None:
        assert self.answer < 0, "no tokens while an answer is acted on"
        assert self.minted <= oldest <= newest, "tokens come from a version that was served since the dispatch"
        last = self.samples[-1] if self.samples else -1
        assert sample in (last, last + 1) if self.samples else sample == 0, "samples follow each other"
        self.versions.append(oldest)
        self.samples.append(sample)

    def _placed(self, record: schema.TurnCommitted | schema.ModelAnswered) -> None:
        assert record.turn == self.turns - 1
        assert record.start == self.tokens.get(record.sample, 0), "tokens follow each other"
        assert record.tokens > 0
        self.tokens[record.sample] = record.start + record.tokens

    def _reach(self, boundary: int) -> None:
        assert boundary > self.last, "boundaries never go back"
        self.boundaries.append(boundary)

    def answered(self, record: schema.ModelAnswered, newest: int) -> None:
        self._generated(record.oldest, record.sample, newest)
        self._placed(record)
        self._reach(record.boundary)
        self.answer, self.asked = record.boundary, []

    def turned(self, record: schema.TurnCommitted, newest: int) -> None:
        if self.answer >= 0:
            self._account(record.oldest, record.sample)
            assert record.turn == self.turns - 1
            assert record.tokens == 0, "its tokens are durable already"
        else:
            self._generated(record.oldest, record.sample, newest)
            self._placed(record)
        self._reach(record.boundary)
        assert record.revisions == self.revisions, "what its requests add up to"

    def seal(self, oldest: int, sample: int, newest: int) -> None:
        if self.answer >= 0:
            self._account(oldest, sample)
        else:
            self._generated(oldest, sample, newest)
        self.live, self.sealed = False, True

    def _account(self, oldest: int, sample: int) -> None:
        """What the environment says of an answer."""
        assert self.open is None, "a turn ends when it is known what became of its requests"
        assert (oldest, sample) == (self.versions[-1], self.samples[-1]), "the turn of the answer"
        self.answer, self.asked = -1, []

    # ------------------------------------------------------------------ requests

    def intend(self, record: schema.RequestIntent) -> None:
        assert self.answer == record.boundary >= 0, "an intent follows the answer that contains it"
        assert self.open is None, "one request at a time"
        key = self._key(record)
        assert key not in self.intents, "intended once"
        assert record.revision == self.revisions.get(record.resource, 0)
        self.intents[key], self.asked_by = record.digest, record.attempt
        self.asked.append(Asked(record.resource, record.digest, record.revision))

    def _key(self, record: schema.RequestIntent | schema.RequestResult) -> tuple[int, int, int]:
        number = len(self.asked) - (isinstance(record, schema.RequestResult) and self.open is not None)
        assert record.cursor == number, "actions are numbered"
        return self.root, record.boundary, record.cursor

    def result(self, record: schema.RequestResult) -> bool:
        """Whether it changed something."""
        assert self.answer == record.boundary >= 0, "a result belongs to the answer that is acted on"
        key, before, asked = self._key(record), self.revisions.get(record.resource, 0), self.open
        assert key not in self.results, "one result of each"
        self.results.add(key)
        if asked is None:
            assert record.revision == before, "what was not intended changes nothing"
            self.asked.append(asked := Asked(record.resource, record.digest, before))
        assert (asked.resource, asked.digest) == (record.resource, record.digest), "the result of what was intended"
        assert record.revision in (before, before + 1), "a change is one revision"
        asked.reply = record.reply
        if record.revision:
            self.revisions[record.resource] = record.revision
        return record.revision > before

    def export(self, record: schema.ResourceExported) -> None:
        assert self.turns, "what was exported belongs to a boundary"
        assert record.revision == self.revisions.get(record.resource, 0), "the state that the requests led to"
        self.exports[record.resource] = record.revision

    # ------------------------------------------------------------------ the ledger's view

    def compare(self, at: Boundary | None) -> None:
        """An unsealed rollout goes on where its records end."""
        assert (at is None) == (not self.turns)
        assert all(before < after for before, after in pairwise(self.boundaries))
        if at is None:
            return
        assert (at.index, at.root) == (self.last, self.root)
        assert (at.turn, at.sample) == (self.turns - 1, self.samples[-1])
        assert at.position == self.tokens[at.sample]
        assert at.pending == (self.answer >= 0)
        shown = [(one.resource, one.digest, one.before, one.reply) for one in at.requests]
        assert shown == [(one.resource, one.digest, one.revision, one.reply) for one in self.asked]
        assert {name: at.revision(name) for name in self.revisions} == self.revisions
        assert {name: one.revision for name, one in at.exports.items()} == self.exports
