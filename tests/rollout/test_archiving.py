"""A manager's ledger is written down beside it, a restore begins there, and what goes wrong with that stops nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gpu.rollout import archiving
from storage.errors import ActorLost
from storage.journal import fold, recorded_snapshots, restore_point
from storage.schema import LedgerSnapshot
from tests.rollout.building import RUN
from tests.rollout.desk import Desk, until


async def step(desk: Desk, number: int) -> None:
    """One training step, from the first attempt to the update."""
    await desk.finish(await desk.take(100))
    grant = await desk.manager.lease(desk.caller, 5.0)
    assert grant is not None
    await desk.manager.commit(desk.caller, grant.lease.lease, number, f"state-{number}", f"weights-{number}", {})
    await desk.update(number)


async def journal_of(desk: Desk) -> dict[str, Any]:
    return cast("dict[str, Any]", (await desk.manager.status())["journal"])


async def test_snapshots_follow_the_journal_and_a_restore_begins_at_the_newest(desk: Desk) -> None:
    for number in range(1, 12):
        await step(desk, number)
    await until(lambda: desk.manager.archiving.lag < 8)
    await until(lambda: desk.manager.control.books.journal.durable_seq == desk.manager.control.books.journal.last_seq)
    newest = desk.manager.control.ledger.snapshot
    assert newest is not None
    assert restore_point(desk.store, RUN, 2)[1].slot == newest.slot
    assert len(list(recorded_snapshots(desk.store, RUN))) > 1
    assert fold(desk.store, RUN, 2)[0].step == 11
    assert (await journal_of(desk))["since_snapshot"] < 9


async def test_a_failing_archivist_is_shown_and_tried_again_and_stops_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiving, "MAX_BACKOFF_S", 0.01)
    errors: list[Exception] = [ActorLost("gone", expected="a process", action="wait"), MemoryError("too large")] * 10
    whole = desk.archive
    tried: list[Exception] = []

    async def failing(slot: int) -> LedgerSnapshot:
        if errors:
            tried.append(errors.pop())
            raise tried[-1]
        return await whole(slot)

    desk.archive = failing  # type: ignore[method-assign]
    for number in range(1, 5):
        await step(desk, number)
    await until(lambda: bool(tried))
    assert "try" in (await journal_of(desk))["snapshot_problem"]
    for number in range(5, 9):
        await step(desk, number)
    await until(lambda: desk.manager.control.ledger.snapshot is not None)
    assert (await journal_of(desk))["snapshot_problem"] == ""
    assert len(tried) == 20
