"""Runs a user's group-level work in threads, beside the manager's loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gpu.rollout.results import GroupFilter, verdict
from gpu.rollout.signal import wait_event

if TYPE_CHECKING:
    from gpu.rollout.manager import RolloutManager

RETRY_S = 0.2


async def judge_groups(manager: RolloutManager, work: GroupFilter) -> None:
    """For ever: begin the work of finished groups as far as there are places, and bring in the verdicts."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            event = manager.changed.current()
            for ordinal, rewards in manager.control.results.begin_judging():
                task = asyncio.create_task(_judge(manager, work, ordinal, rewards))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await wait_event(event, RETRY_S)
    finally:
        for task in tasks:
            task.cancel()


async def _judge(manager: RolloutManager, work: GroupFilter, ordinal: int, rewards: tuple[float, ...]) -> None:
    results = manager.control.results
    try:
        reason = await asyncio.to_thread(verdict, work, rewards)
    except Exception as error:  # noqa: BLE001 - user code; the group stays and the work is tried again
        results.judging_failed(ordinal, error)
    else:
        results.judge(ordinal, reason)
        manager.appended()
