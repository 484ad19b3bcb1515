"""The parts that the rollout benchmark measures: a real manager with its journal, and no-op neighbours of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.pipeline import bench_limits
from gpu.rollout.committer import FlushSettings
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.limits import Limits, Submission
from gpu.rollout.manager import ManagerSettings, RolloutManager, open_manager
from gpu.rollout.messages import Accepted, Caller, Dispatch, Ended, Grant, Hold, Outcome, Report, Work
from gpu.rollout.results import keep_all
from storage.clock import SystemClock
from storage.filesystem import Store
from storage.ledger import Policy
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.retention import Retention
from storage.runs import create_run, make_run

RUN = "bench"
PROMPT = 8
CHECKPOINT_EVERY = 10
REPORT = 128
"""Rollouts in one report, as many as a worker of the product puts into one."""


class Manager(Protocol):
    """The manager's calls that the benchmark makes, in this process or through Ray."""

    def take(self, incarnation: int, worker: str, limit: int, timeout: float) -> Awaitable[Work]: ...
    def report(self, incarnation: int, report: Report) -> Awaitable[Accepted]: ...
    def lease(self, caller: Caller, deadline_s: float) -> Awaitable[Grant | None]: ...
    def commit(
        self, caller: Caller, lease: int, step: int, state_digest: str, weights_digest: str, metrics: dict[str, float]
    ) -> Awaitable[None]: ...
    def acquire(self, caller: Caller, purpose: str, ttl_s: float) -> Awaitable[Hold]: ...
    def release(self, caller: Caller, hold: int) -> Awaitable[None]: ...
    def publish_policy(self, caller: Caller, digest: str) -> Awaitable[Policy]: ...
    def activate(self, caller: Caller, hold: Hold) -> Awaitable[None]: ...
    def publish_checkpoint(
        self, caller: Caller, step: int, manifest: str, digest: str, size: int, written: int
    ) -> Awaitable[None]: ...


class InstantEngines(EngineControl):
    """Serves a published version at once."""

    names = ("e",)

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager

    async def activate(self, policy: Policy) -> None:
        self._manager.serve(policy.number)


def make_limits(siblings: int, batch: int, submission: Submission) -> Limits:
    """As a user sets them for a staleness bound of 2: room for all groups that the bound admits, and one batch more."""
    groups = 4 * batch
    return bench_limits(siblings, batch, submission, staleness=2, executing=groups, completed=groups, backoff=batch)


def make_manager(store: Store, limits: Limits) -> RolloutManager:
    """A new run and its manager, with engines that need no time. Start it on a running loop. Its checkpoints are
    records only: that there is nothing to delete of them is said once for each."""
    logging.getLogger("gpu.rollout.retaining").setLevel(logging.ERROR)
    info = make_run(run=RUN, created=0.0, num_siblings=limits.num_siblings, staleness=limits.staleness,
                    fingerprints={}, settings={})  # fmt: skip
    create_run(store, info)
    manager = open_manager(
        store,
        info,
        limits,
        SystemClock(),
        ManagerSettings(FlushSettings(0.25, 4 << 20, 5.0), 60.0, 300.0, 64, Retention(3, 0, "keep", 60.0)),
        owner="bench",
        reason="start",
        length=None,
        group_filter=keep_all,
    )
    manager.engines = InstantEngines(manager)
    return manager


class NoopWorker:
    """Takes attempts and reports them finished at once, each with `tokens` generated tokens (0: no payload)."""

    def __init__(self, name: str, manager: Manager, incarnation: int, tokens: int) -> None:
        self._name, self._manager, self._incarnation, self._tokens = name, manager, incarnation, tokens
        self._blocks = 0

    async def run(self, at_once: int = 1 << 20) -> None:
        while True:
            work = await self._manager.take(self._incarnation, self._name, at_once, 5.0)
            for start in range(0, len(work.dispatches), REPORT):
                await self._manager.report(self._incarnation, self._finished(work.dispatches[start : start + REPORT]))

    def _finished(self, dispatches: list[Dispatch]) -> Report:
        self._blocks += 1
        sealed, tokens = Outcome.SEALED, max(1, self._tokens)
        ended = tuple(
            [Ended(dispatch.identity, sealed, row, tokens, dispatch.version, 1.0)
             for row, dispatch in enumerate(dispatches)]
        )  # fmt: skip
        name = f"{self._incarnation:06d}-{self._name}-{self._blocks:08d}"
        if not self._tokens:
            return Report(self._name, name, "0" * 64, 0, None, (), ended)
        block = encode_block(name, [self._row(dispatch) for dispatch in dispatches])
        return Report(self._name, block.name, block.digest, len(block.data), block.data, (), ended)

    def _row(self, dispatch: Dispatch) -> TurnRow:
        one, size = dispatch.identity, PROMPT + self._tokens
        mask = np.zeros(size, np.int8)
        mask[PROMPT:] = 1
        span = VersionSpan(one.incarnation, dispatch.version, self._tokens)
        return TurnRow(one.group, one.sibling, one.attempt, 0, 0, 0, np.arange(size, dtype=np.int32),
                       np.zeros(size, np.float32), mask, (span,), True, 1.0, "")  # fmt: skip


class NoopDriver:
    """Leases, commits and updates, and publishes a checkpoint's record every few steps; trains in no time."""

    def __init__(self, manager: Manager, caller: Caller) -> None:
        self._manager, self._caller = manager, caller
        self._step = 0

    async def update(self) -> None:
        hold = await self._manager.acquire(self._caller, "update", 60.0)
        await self._manager.publish_policy(self._caller, f"weights-{self._step}")
        await self._manager.activate(self._caller, hold)
        await self._manager.release(self._caller, hold.hold)

    async def train(self, groups: int) -> int:
        """Train at least so many groups; returns how many."""
        done = 0
        while done < groups:
            grant = await self._manager.lease(self._caller, 60.0)
            assert grant is not None
            self._step = step = grant.lease.step
            await self._manager.commit(
                self._caller, grant.lease.lease, step, f"state-{step}", f"weights-{step}", {"loss": 0.0}
            )
            await self.update()
            if step % CHECKPOINT_EVERY == 0:
                await self._manager.publish_checkpoint(self._caller, step, f"checkpoints/{step}", "d", 1, 1)
            done += len(grant.lease.groups)
        return done


async def stop(manager: RolloutManager, *tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await manager.stop()


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
