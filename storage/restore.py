"""From storage back to a trainer's state: the newest valid checkpoint, and the committed steps to redo after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from storage.buffers import NamedBuffer
from storage.checkpoint import Manifest, read_buffers, read_manifest
from storage.errors import RestoreRefused, StorageUnusable, StoreUnavailable, TidegateError
from storage.filesystem import Store
from storage.ledger import Block, Ledger, Step
from storage.schema import CheckpointPublished


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Everything a trainer needs to reach the run's last committed step, as values (it crosses processes).

    `checkpoints` newest first; `genesis` says that the initial weights are a valid base too; `steps` and `blocks` cover
    every step after the oldest base.
    """

    run: str
    step: int
    state_digest: str
    checkpoints: tuple[CheckpointPublished, ...]
    genesis: bool
    steps: dict[int, Step]
    blocks: dict[str, Block]
    fresh: bool = True
    """Whether the incarnation has published no version yet, so that steps can still be reverted in it."""


@dataclass(slots=True)
class Base:
    """Where a restore starts: `manifest` is None for the initial weights. `rejected` lists newer ones and why."""

    step: int
    manifest: Manifest | None
    buffers: dict[str, NamedBuffer]
    rejected: list[str] = field(default_factory=lambda: [])


def plan_restore(ledger: Ledger, run: str) -> RestorePlan:
    """What a trainer needs, from a folded ledger."""
    names = {
        name for step in ledger.steps.values() for group in step.lease.groups for rows in group.rows for name, _ in rows
    }
    return RestorePlan(
        run=run,
        step=ledger.step,
        state_digest=ledger.state_digest,
        checkpoints=tuple(reversed(ledger.checkpoints)),
        genesis=ledger.from_genesis,
        steps=dict(ledger.steps),
        blocks={name: ledger.blocks[name] for name in names},
        fresh=ledger.policy is None or ledger.policy.incarnation != ledger.incarnation,
    )


def load_base(store: Store, plan: RestorePlan, say: Callable[[str], None] = lambda line: None) -> Base:
    """Read the newest checkpoint whose every object is what its digest says. Raises `RestoreRefused`.

    Nothing live is touched: the caller installs what is returned.
    """
    rejected: list[str] = []
    for record in plan.checkpoints:
        try:
            manifest = read_manifest(store, plan.run, record.manifest, record.digest)
            say(f"op=restore phase=read step={record.step} bytes={record.size}")
            return Base(record.step, manifest, read_buffers(store, plan.run, manifest), rejected)
        except (StoreUnavailable, StorageUnusable):
            raise  # says nothing about the checkpoint
        except TidegateError as error:
            rejected.append(f"checkpoint of step {record.step}: {error}")
            say(f"op=restore phase=read step={record.step} decision=rejected reason={error}")
    if plan.genesis:
        return Base(0, None, {}, rejected)
    raise RestoreRefused(
        "; ".join(rejected) or "no checkpoint",
        expected=f"one valid checkpoint among the newest {len(plan.checkpoints)}",
        action="restore the damaged objects from a copy, or fork from an older checkpoint",
    )
