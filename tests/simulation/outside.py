"""What the rollouts of a simulated world change outside of it: a host whose sessions survive every process, and which
counts its effects. And the oracle of these effects, which reads the journal and nothing else."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu.environments.base import CheckpointMode
from gpu.environments.resources import Claim, Reply, Request, ResourceHost, Standing, refusal, refused, success
from gpu.environments.resources import ToolError as Refused
from storage import schema
from storage.errors import ResourceInvalid
from storage.history import read_all
from storage.journal import read_segment
from storage.ledger import Export
from storage.segment import Row
from tests.simulation.incarnations import RUN

if TYPE_CHECKING:
    from tests.simulation.world import World

BOX, DESK, PEN = "box", "desk", "pen"
"""BOX survives every process and is changed for good; the sessions of DESK and PEN die with their worker, those of DESK
come back from exports."""
REQUEST = re.compile(rf"{RUN}/g(\d+)/(\d+)~(\d+)\.(\d+)\.(\d+)")


class Key(NamedTuple):
    """A request of a lineage; `boundary` alone is unique in a rollout."""

    group: int
    sibling: int
    root: int
    boundary: int
    cursor: int


def key_of(request: str) -> Key:
    found = REQUEST.fullmatch(request)
    assert found is not None, request
    return Key(*map(int, found.groups()))


def always() -> bool:
    return True


class Flight(NamedTuple):
    """A request that is on its way."""

    session: str
    claim: Claim
    request: Request


@dataclass
class Pause:
    """Where a simulated process waits, until `ready`; `flight` is on its way meanwhile."""

    ready: Callable[[], bool] = always
    flight: Flight | None = None

    def __await__(self) -> Generator[Pause]:
        yield self


@dataclass
class Held:
    claim: Claim
    revision: int = 0
    receipts: dict[str, tuple[str, Reply]] = field(default_factory=lambda: {})


class Box(ResourceHost):
    """The host of BOX, one for the whole world. Its effects cannot be taken back, and nothing brings a session back."""

    checkpoint_mode = CheckpointMode.EXPORT_RESTORE
    survives = True

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._sessions: dict[str, Held] = {}

    async def start(self, session: str, claim: Claim, task: bytes, seed: int) -> None:
        held = self._sessions.setdefault(session, Held(claim))
        self._bar(session, held, claim)
        assert not held.revision, "a session is begun at its beginning"

    async def claim(self, session: str, claim: Claim) -> int | None:
        held = self._sessions.get(session)
        if held is None:
            return None
        self._bar(session, held, claim)
        return held.revision

    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        flight = Flight(session, claim, request)
        await Pause(flight=flight)
        reply = self.arrive(flight)
        await Pause()
        return reply

    def arrive(self, flight: Flight) -> Reply:
        """A request comes here, whoever is still there to hear of it."""
        held, request = self._find(flight.session, flight.claim), flight.request
        known = self._receipt(flight.session, held, request)
        if known is not None:
            return known
        if request.revision != held.revision:
            raise refused(flight.session, f"revision {held.revision}", f"revision {request.revision}", "revision")
        if request.reads:
            return Reply(success(held.revision), held.revision)
        if self._outside.refuses():
            reply = Reply(refusal(Refused("not today")), held.revision)
        else:
            self._outside.effect(request)
            held.revision += 1
            reply = Reply(success(held.revision), held.revision)
        held.receipts[request.id] = (request.digest, reply)
        return reply

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        held = self._find(session, claim)
        if self._outside.forgets():
            return Standing.UNKNOWN, None
        known = self._receipt(session, held, request)
        return (Standing.NOT_APPLIED, None) if known is None else (Standing.APPLIED, known)

    async def export(self, session: str, claim: Claim) -> Export:
        return Export(self._find(session, claim).revision, b"")

    async def restore(self, session: str, claim: Claim, task: bytes, seed: int, export: Export) -> None:
        """What is outside is where it is; only the session's number comes back."""
        self._sessions[session] = Held(claim, export.revision)

    async def end(self, session: str) -> None:
        self._sessions.pop(session, None)

    def _bar(self, session: str, held: Held, claim: Claim) -> None:
        if claim < held.claim:
            raise refused(session, f"claim {claim}", f"at least {held.claim}", "claimed")
        held.claim = claim

    def _find(self, session: str, claim: Claim) -> Held:
        held = self._sessions.get(session)
        if held is None:
            raise refused(session, "no such session", "one that was started", "missing")
        if claim < held.claim:
            raise refused(session, f"claim {claim}", f"at least {held.claim}", "claimed")
        return held

    def _receipt(self, session: str, held: Held, request: Request) -> Reply | None:
        digest, reply = held.receipts.get(request.id, (request.digest, None))
        if digest != request.digest:
            raise AssertionError(f"{session}: one request id for two inputs")
        return reply


@dataclass
class Course:
    """What the journal says of a rollout since it started from scratch. `changes` are (key, resource, digest)."""

    root: int
    attempt: int
    incarnation: int
    open: schema.RequestIntent | None = None
    revisions: Counter[str] = field(default_factory=lambda: Counter[str]())
    changes: list[tuple[Key, str, str]] = field(default_factory=lambda: [])


class Outside:
    """The host of BOX and its oracle. `effects` counts, `inputs` are their digests; `logs` are what each sealed attempt
    found in its session with DESK. `late` are requests whose sender is gone."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._dice = random.Random(f"outside {seed}")
        self.box = Box(self)
        self.effects: Counter[Key] = Counter()
        self.inputs: dict[Key, str] = {}
        self.logs: dict[tuple[int, int, int, int], list[str]] = {}
        self.late: list[Flight] = []
        self._durable: dict[tuple[int, int, int, int], str] = {}
        self._read = 0

    # ------------------------------------------------------------------ while it goes on

    def refuses(self) -> bool:
        """The host does not do what it is asked."""
        return self._world.faults and self._dice.random() < 0.1

    def forgets(self) -> bool:
        """The host cannot say what became of a request."""
        return self._world.faults and self._dice.random() < 0.1

    def effect(self, request: Request) -> None:
        """Something changes for good."""
        key = key_of(request.id)
        self.effects[key] += 1
        assert self.effects[key] == 1, "each request takes effect once"
        assert self._intended(key) == request.digest, "a change is made only when its intent is durable"
        self.inputs[key] = request.digest
        self._world.tally["effects"] += 1

    def _intended(self, key: Key) -> str | None:
        """The input of an intent that is in the store."""
        wanted = (key.group, key.sibling, key.boundary, key.cursor)
        store = self._world.store
        while (segment := read_segment(store, RUN, self._read)) is not None:
            self._read += 1
            self._note(segment.rows)
        if wanted not in self._durable:
            for segment in read_all(store, RUN):  # slots may have been retired before they were read here
                self._note(segment.rows)
                self._read = segment.header.slot + 1
        return self._durable.get(wanted)

    def _note(self, rows: list[Row]) -> None:
        for row in rows:
            if isinstance(found := row.record, schema.RequestIntent):
                self._durable[found.group, found.sibling, found.boundary, found.cursor] = found.digest

    def overtake(self, session: str) -> None:
        """A successor has claimed a session: what its predecessor sent arrives only now."""
        for flight in [flight for flight in self.late if flight.session == session]:
            if self._dice.random() < 0.5:
                self.late.remove(flight)
                self._arrive(flight)

    def deliver_late(self) -> None:
        """A request arrives whose sender is gone: somebody may have gone on without it."""
        self._arrive(self.late.pop(self._dice.randrange(len(self.late))))

    def _arrive(self, flight: Flight) -> None:
        try:
            self.box.arrive(flight)
        except ResourceInvalid as error:
            self._world.tally[f"requests_barred_{error.code}"] += 1
        else:
            self._world.tally["requests_late"] += 1

    # ------------------------------------------------------------------ at the end

    def check(self) -> None:
        """In storage, every rollout that was trained has made each of its changes once, in order, and no other."""
        while self.late:
            self.deliver_late()
        effects: dict[tuple[int, int, int], list[Key]] = {}
        for key in self.effects:
            effects.setdefault(key[:3], []).append(key)
        courses = self._courses()
        for (group, sibling), course in courses.items():
            made = [key for key, resource, _ in course.changes if resource == BOX]
            assert sorted(effects.get((group, sibling, course.root), [])) == sorted(made), "each change, and no other"
            assert all(self.inputs[key] == digest for key, resource, digest in course.changes if resource == BOX)
            log = self.logs[group, sibling, course.attempt, course.incarnation]
            assert log == [digest for _, resource, digest in course.changes if resource == DESK], "in their order"
            self._world.tally["changes_kept"] += len(course.changes)
        kept = sum(resource == BOX for course in courses.values() for _, resource, _ in course.changes)
        self._world.tally["effects_of_lost_work"] += len(self.effects) - kept

    def _courses(self) -> dict[tuple[int, int], Course]:
        """Of every rollout of a trained group, since it last started."""
        found: dict[tuple[int, int], Course] = {}
        incarnation = 0
        for segment in read_all(self._world.store, RUN):
            for row in segment.rows:
                record: Any = row.record
                if isinstance(record, schema.RunClaimed):
                    incarnation = record.incarnation
                elif isinstance(record, schema.AttemptsMinted | schema.GroupsDispatched):
                    for group, sibling, attempt in schema.minted(record):
                        self._mint(found, record, (group, sibling), attempt, incarnation)
                elif isinstance(record, schema.RequestIntent):
                    course = found[record.group, record.sibling]
                    assert course.open is None
                    course.open = record
                elif isinstance(record, schema.RequestResult):
                    self._result(found[record.group, record.sibling], record)
        trained = self._world.control.ledger.consumed
        kept = {key: course for key, course in found.items() if key[0] in trained}
        assert len(kept) == len(trained) * self._world.limits.num_siblings
        return kept

    @staticmethod
    def _mint(
        found: dict[tuple[int, int], Course],
        record: schema.AttemptsMinted | schema.GroupsDispatched,
        rollout: tuple[int, int],
        attempt: int,
        incarnation: int,
    ) -> None:
        at = record.boundaries[record.siblings.index(rollout[1])] if isinstance(record, schema.AttemptsMinted) else -1
        if at < 0:
            found[rollout] = Course(attempt, attempt, incarnation)
        else:
            found[rollout].attempt, found[rollout].incarnation = attempt, incarnation

    @staticmethod
    def _result(course: Course, record: schema.RequestResult) -> None:
        if record.revision > course.revisions[record.resource]:
            assert course.open is not None
            assert (course.open.digest, course.open.cursor) == (record.digest, record.cursor)
            key = Key(record.group, record.sibling, course.root, record.boundary, record.cursor)
            course.changes.append((key, record.resource, record.digest))
            course.revisions[record.resource] = record.revision
        if course.open is not None and course.open.cursor == record.cursor:
            course.open = None
