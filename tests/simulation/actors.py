"""Attempts of a simulated world that act on the model's answers: the real `Tools`, driven from pause to pause, so that
everything may die in between."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu.environments.base import CheckpointMode
from gpu.environments.resources import Claim, Reply, ResourceHost, ToolError, canonical, request_digest
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.tools import Exported, NotContinuable, Sessions, Tools
from gpu.rollout.messages import Accepted, Answered, Continuation, Identity, Intent, Progress, Report, Result
from gpu.rollout.messages import Exported as ExportedEntry
from gpu.rollout.topology import NO_RESOURCES, Topology
from storage.errors import ResourceInvalid
from storage.ledger import Boundary
from storage.payload import TurnRow
from storage.reader import PayloadReader
from tests.simulation.incarnations import RUN, Incarnation
from tests.simulation.outside import BOX, DESK, PEN, Outside, Pause

if TYPE_CHECKING:
    from tests.simulation.workers import Running
    from tests.simulation.world import World

TOPOLOGY = Topology(modes={BOX: "export_restore", DESK: "export_restore", PEN: "restart_only"})
OPERATION = "do"


class Log(Session):
    """Knows the digests of what was done to it, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        if arguments["reads"]:
            return len(self.done)
        if arguments["refused"]:
            raise ToolError("no")
        self.done.append(request_digest(operation, canonical(arguments)))
        return len(self.done)

    def export_state(self) -> bytes:
        return "\n".join(self.done).encode()

    def restore_state(self, data: bytes) -> None:
        self.done = data.decode().split("\n")


class Logs(SessionHost):
    """Shows the sessions of a worker's host."""

    def log(self, session: str) -> list[str]:
        held = self._held.get(session)
        found = held.session if held is not None else None
        return list(found.done) if isinstance(found, Log) else []


class Action(NamedTuple):
    resource: str
    what: str
    reads: bool
    refused: bool


class Ending(NamedTuple):
    """A turn came to its end. `acted`: its answer was a boundary."""

    call: TurnRow
    acted: bool
    revisions: dict[str, int]
    exports: list[Exported]


class Actors:
    """Draws from dice of its own; in worlds without acting attempts it draws nothing. `ghosts` wait for the manager
    that they belong to, which was stopped."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.dice = random.Random(f"actors {seed}")
        self.acting = world.multi_turn and self.dice.random() < world.shape.acting
        self.topology = TOPOLOGY if self.acting else NO_RESOURCES
        self.outside = Outside(world, seed)
        self.hosts: dict[str, dict[str, ResourceHost]] = {}
        self.ghosts: list[Actor] = []

    def of_worker(self, name: str) -> dict[str, ResourceHost]:
        """The hosts that a worker process reaches: two of them live and die with it."""
        if name not in self.hosts:
            self.hosts[name] = {
                BOX: self.outside.box,
                DESK: Logs(lambda task, seed: Log()),
                PEN: SessionHost(lambda task, seed: Log(), mode=CheckpointMode.RESTART_ONLY, replayable=False),
            }
        return self.hosts[name]

    def actions(self, call: TurnRow) -> list[Action]:
        """What an answer contains: it is the answer's, whoever acts on it."""
        said = f"{call.group}/{call.sibling}~{call.attempt}@{call.spans[0].incarnation}.{call.turn}"
        dice = random.Random(f"answer {said} {self.seed}")
        if dice.random() < 0.4:
            return []
        return [
            Action(dice.choice([BOX] * 4 + [DESK] * 4 + [PEN]), f"{said}.{number}", dice.random() < 0.3,
                   dice.random() < 0.1)
            for number in range(dice.choice([1, 1, 2, 3]))
        ]  # fmt: skip

    def told(self, report: Report, accepted: Accepted, running: list[Running]) -> list[Running]:
        """The answer to a report; returns the attempts that are over."""
        over = [run for run in running if run.dispatch.identity in accepted.over]
        self.settle(report, accepted, [run for run in running if run not in over])
        return over

    def settle(self, report: Report, accepted: Accepted, running: list[Running]) -> None:
        """Whoever has reported an intent waits for this record from here on."""
        intents = {entry.identity for entry in report.turns if isinstance(entry, Intent)}
        for run in running:
            if run.actor is not None and run.dispatch.identity in intents:
                run.actor.settles(accepted.seq)

    # ------------------------------------------------------------------ death

    def die(self, runs: list[Running], manager: Incarnation | None) -> None:
        """Their processes are gone, or theirs is not: what is on its way may arrive all the same."""
        for run in runs:
            if run.actor is not None:
                self._leave(run.actor, manager)

    def _leave(self, actor: Actor, manager: Incarnation | None) -> None:
        pause = actor.pause
        if pause is not None and pause.flight is not None and self.dice.random() < 0.5:
            self.outside.late.append(pause.flight)
            self.world.tally["requests_left_behind"] += 1
        elif actor.waits and manager is not None and actor.manager is manager:
            self.ghosts.append(actor)
            return
        actor.close()

    @property
    def any_late(self) -> bool:
        return bool(self.outside.late or self.ghosts)

    def go_on_late(self) -> None:
        """What nobody waits for any more comes all the same, or an attempt of a stopped manager learns that its intent
        is durable."""
        for ghost in [ghost for ghost in self.ghosts if ghost.pause is not None and ghost.pause.ready()]:
            self.ghosts.remove(ghost)
            ghost.go_on()
            if ghost.pause is not None and ghost.pause.flight is not None:
                self.outside.late.append(ghost.pause.flight)
                self.world.tally["ghosts_acted"] += 1
            ghost.close()
        if self.outside.late:
            self.outside.deliver_late()


class Actor:
    """One attempt at its resources. `out` is what it has to report, with its rows."""

    def __init__(self, actors: Actors, run: Running, worker: str) -> None:
        self._actors, self._run = actors, run
        self.manager = actors.world.manager
        self.identity: Identity = run.dispatch.identity
        self._hosts = actors.of_worker(worker)
        continuation, one = run.dispatch.continuation, self.identity
        self._at: Boundary | None = continuation.at if continuation is not None else None
        self._sessions = Sessions(RUN, one.group, one.sibling, one.attempt if self._at is None else self._at.root)
        self._tools = Tools(self._hosts, self._sessions, Claim(one.incarnation, one.attempt), b"{}", 0, self)
        self._begun = False
        self.pending = self._pending(continuation)
        self.out: list[tuple[TurnRow | None, Progress]] = []
        self.pause: Pause | None = None
        self.waits = False
        self._settled: int | None = None
        self._turn: Coroutine[Pause, None, Ending] | None = None
        self._call: TurnRow | None = None

    def _pending(self, continuation: Continuation | None) -> TurnRow | None:
        """The tokens of the answer that the attempt goes on from."""
        if continuation is None or not continuation.at.pending:
            return None
        reader = PayloadReader(self._actors.world.store, RUN, continuation.hot.get)
        return reader.rows(continuation.rows, continuation.blocks)[-1]

    # ------------------------------------------------------------------ from pause to pause

    @property
    def busy(self) -> bool:
        """In the middle of a turn."""
        return self._turn is not None

    def begin(self, call: TurnRow, *, done: bool) -> None:
        self._call = call
        self._turn = self._act(call, self._at if self.pending is not None else None, done=done)
        self.pending = None

    async def _act(self, call: TurnRow, at: Boundary | None, *, done: bool) -> Ending:
        if not self._begun:
            await self._tools.begin(self._at)
            self._begun = True
            self._actors.outside.overtake(self._sessions.name)
        self._tools.turn_begins(at)
        for one in self._actors.actions(call):
            ask = self._tools.read if one.reads else self._tools.call
            try:
                await ask(one.resource, OPERATION, one._asdict())
            except ToolError:
                continue
        return Ending(call, *await self._tools.turn_ended(last=done))

    def go_on(self) -> Ending | None:
        """To the next pause; the turn's end when it came. Raises `NotContinuable` and `ResourceInvalid`."""
        assert self._turn is not None
        if self.pause is not None and not self.pause.ready():
            return None
        self.waits, self.pause = False, None
        try:
            self.pause = self._turn.send(None)
            return None
        except StopIteration as stop:
            self._turn = None
            return stop.value

    def close(self) -> None:
        if self._turn is not None:
            self._turn.close()

    def seal(self) -> None:
        """The attempt has reported its last turn: its sessions end, whether or not that is durable."""
        one, desk = self.identity, self._hosts[DESK]
        assert isinstance(desk, Logs)
        self._actors.outside.logs[one.group, one.sibling, one.attempt, one.incarnation] = desk.log(self._sessions.name)
        ending = self._tools.end()
        while True:
            try:
                ending.send(None)
            except StopIteration:
                return

    # ------------------------------------------------------------------ `tools.Journal`

    def answered(self) -> int:
        run, call = self._run, self._call
        assert call is not None
        boundary, run.boundary = run.boundary, run.boundary + 1
        self.out.append(
            (call, Answered(self.identity, boundary, call.turn, call.sample, -1, call.start, len(call.tokens),
                            call.oldest))
        )  # fmt: skip
        return boundary

    async def intent(self, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        self.out.append((None, Intent(self.identity, boundary, cursor, resource, revision, digest)))
        self.waits, self._settled = True, None
        await Pause(self._durable)

    def settles(self, seq: int) -> None:
        """What was reported is durable when this record is."""
        if self._settled is None:
            self._settled = seq

    def _durable(self) -> bool:
        return self._settled is not None and self.manager.writer.durable_seq >= self._settled

    def result(self, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        self.out.append(
            (None, Result(self.identity, boundary, cursor, resource, reply.revision, digest, reply.content))
        )

    def exported(self, exports: list[Exported]) -> None:
        for resource, export in exports:
            self.out.append((None, ExportedEntry(self.identity, resource, export.revision, export.state)))


LOST = (NotContinuable, ResourceInvalid)
"""What ends an attempt as not continuable."""
