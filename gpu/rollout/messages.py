"""What crosses between the manager, its workers and its driver. All values, compared by content.

None can be part of a reference cycle, so the numerous ones are invisible to the garbage collector.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from storage.ledger import Block, Boundary, Lease, Obligation
from storage.schema import Receipt


class Outcome(Enum):
    """How an attempt ended. Each has its transition and its share of a budget.

    SEALED      finished with a finite reward; costs nothing
    FAILED      the environment's or reward's code raised; one of the prompt's attempts
    MALFORMED   the result breaks a rule (reward not finite, tokens older than dispatch, no output, turns or samples
                that do not follow each other); one attempt
    ABORTED     generation was cancelled; one attempt
    ENGINE_LOST, WORKER_LOST   a process died; counted apart, because it says nothing about the prompt
    NOT_CONTINUABLE  it could not go on from its last boundary; its turns are given up, and it starts over; counted with
                     the dead processes, of which it is a consequence
    """

    SEALED = "sealed"
    FAILED = "failed"
    MALFORMED = "malformed"
    ABORTED = "aborted"
    ENGINE_LOST = "engine_lost"
    WORKER_LOST = "worker_lost"
    NOT_CONTINUABLE = "not_continuable"


class Identity(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One attempt, unique over the life of a run."""

    group: int
    sibling: int
    attempt: int
    incarnation: int

    def __str__(self) -> str:
        return f"g{self.group}/{self.sibling}~{self.attempt}@{self.incarnation}"


class Continuation(msgspec.Struct, frozen=True, gc=False):
    """Where an attempt goes on: the rows of the durable turns, the bytes of those blocks that are still in the
    manager's memory, and the boundary after the last turn."""

    rows: tuple[tuple[str, int], ...]
    blocks: dict[str, Block]
    hot: dict[str, bytes]
    at: Boundary


class PlainTask(msgspec.Struct, frozen=True, gc=False):
    """What a plain execution runs: task `index` of an evaluation suite."""

    suite: str
    index: int


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Run this attempt. `version` is the policy version that all serving engines have confirmed, `boundary` the index
    of the attempt's first boundary. `plain` for a plain execution, whose identity has a negative group."""

    identity: Identity
    version: int
    boundary: int
    continuation: Continuation | None = None
    plain: PlainTask | None = None


class AckBatch(msgspec.Struct, frozen=True):
    """Acknowledgements to deliver to one process of a host, all or none."""

    host: str
    boot: str
    owed: tuple[Obligation, ...]


class Acked(msgspec.Struct, frozen=True):
    """What became of a batch: `done`, or the host's process was `replaced`, or neither, for a reason."""

    batch: AckBatch
    done: bool
    replaced: bool = False
    detail: str = ""


class Work(msgspec.Struct, frozen=True):
    """Attempts for a worker, the engines that have confirmed the current version, and acknowledgements to deliver."""

    dispatches: list[Dispatch]
    engines: tuple[str, ...]
    acks: tuple[AckBatch, ...] = ()


class Turn(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A finished turn of a live attempt, see `storage.schema.TurnCommitted`: row `row` of the report's block, -1
    without one; the agent's and the environment's state after it."""

    identity: Identity
    boundary: int
    turn: int
    sample: int
    row: int
    start: int
    tokens: int
    oldest: int
    state: bytes
    revisions: dict[str, int] = {}


class Answered(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer of a live attempt that is about to be acted on, see `storage.schema.ModelAnswered`."""

    identity: Identity
    boundary: int
    turn: int
    sample: int
    row: int
    start: int
    tokens: int
    oldest: int


class Intent(msgspec.Struct, frozen=True, gc=False, tag=True):
    """See `storage.schema.RequestIntent`."""

    identity: Identity
    boundary: int
    cursor: int
    resource: str
    revision: int
    digest: str


class Result(msgspec.Struct, frozen=True, gc=False, tag=True):
    """See `storage.schema.RequestResult`."""

    identity: Identity
    boundary: int
    cursor: int
    resource: str
    revision: int
    digest: str
    reply: bytes


class Exported(msgspec.Struct, frozen=True, gc=False, tag=True):
    """See `storage.schema.ResourceExported`."""

    identity: Identity
    resource: str
    revision: int
    state: bytes


Progress = Turn | Answered | Intent | Result | Exported
"""What a live attempt has done, in the order in which it did it."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """An attempt ended. `row`, `tokens` (generated in the last turn), `oldest`, `reward` and `samples` (output samples
    of the rollout) count only when sealed."""

    identity: Identity
    outcome: Outcome
    row: int = -1
    tokens: int = 0
    oldest: int = -1
    reward: float = 0.0
    detail: str = ""
    samples: int = 1
    receipts: tuple[Receipt, ...] = ()
    """Of hosts that keep the result; their places are filled in."""


class PlainEnded(msgspec.Struct, frozen=True, gc=False):
    """An attempt of a plain execution ended. `tokens` of all its turns, the versions that generated them, and `reward`
    count only when sealed."""

    identity: Identity
    outcome: Outcome
    tokens: int = 0
    oldest: int = -1
    newest: int = -1
    reward: float = 0.0
    detail: str = ""


class Report(msgspec.Struct, frozen=True, gc=False):
    """What a worker says at once. The block's rows are durable as payload/<block>.arrow, cut into `batches` when it is
    large, or travel in `inline`."""

    worker: str
    block: str
    digest: str
    size: int
    inline: bytes | None
    turns: tuple[Progress, ...]
    ended: tuple[Ended, ...]
    plain: tuple[PlainEnded, ...] = ()
    batches: tuple[tuple[int, int, int, int], ...] = ()


class Accepted(msgspec.Struct, frozen=True):
    """The answer to a report: how many entries counted, and how many came too late or twice and changed nothing. What
    counted is durable when record `seq` is; the attempts `over` are not live, whatever they still do."""

    accepted: int
    ignored: int
    seq: int = -1
    over: tuple[Identity, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """What an incarnation found of unfinished groups. Rollouts: `finished` ones are used as they are, `continued` ones
    go on from a turn, `restarted` ones had none when their process died, `given_up` ones had turns from which nothing
    can go on. `requeued` groups start whole."""

    finished: int = 0
    continued: int = 0
    restarted: int = 0
    given_up: int = 0
    requeued: int = 0

    def __str__(self) -> str:
        said = f"{self.finished} finished rollouts reused, {self.continued} go on from a turn, {self.restarted} restart"
        said += f", {self.given_up} give up their turns" if self.given_up else ""
        said += f", {self.requeued} groups start whole" if self.requeued else ""
        return f"{said}, 0 lost"


class Grant(msgspec.Struct, frozen=True):
    """The right to train one batch, with where its token rows lie. `hot` are blocks in the manager's memory."""

    lease: Lease
    state_digest: str
    blocks: dict[str, Block]
    hot: dict[str, bytes]


class Wait(msgspec.Struct, frozen=True):
    """Why something cannot happen now, and who can change it. `gate` names the kind of wait, `on` the component that
    can end it (trainer, workers, submission, driver), "" when it is none of them."""

    reason: str
    who: str
    gate: str
    on: str = ""


class Hold(msgspec.Struct, frozen=True):
    """One owner's claim that keeps reservations and leases closed. Effects under it carry (hold, epoch). `frontier` is
    the number of executions that were active when it was acquired."""

    hold: int
    epoch: int
    owner: str
    purpose: str
    frontier: int


class Caller(msgspec.Struct, frozen=True):
    """Who calls the manager: the incarnation it believes in, and for a driver its token (0 for workers)."""

    incarnation: int
    token: int = 0
