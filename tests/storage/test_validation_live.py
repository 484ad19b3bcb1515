"""The errors of live processes that no other test leads to: each by its smallest cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpu.fleet import Fleet
from gpu.rollout.signal import Signal
from gpu.training.checkpoints import Checkpoints
from storage.errors import (
    ActorLost,
    DeadlineExceeded,
    LeaseRefused,
    LedgerInvalid,
    RestoreRefused,
    StorageUnusable,
    TidegateError,
    WeightsUnavailable,
)
from storage.ledger import COMPLETED, Policy
from storage.memory import MemoryStore
from storage.publisher import ThreadPublisher
from storage.s3 import S3Store
from tasks import run as running
from tasks.publish import check_saved
from tasks.session import begin
from tests.rollout.building import Bench


def named(error: TidegateError, code: str, exit_code: int = 1) -> None:
    assert (error.code, error.exit_code) == (code, exit_code)
    assert error.found
    assert error.expected
    assert error.action


def test_an_upload_without_a_capture_is_refused() -> None:
    store = MemoryStore()
    with pytest.raises(LeaseRefused) as caught:
        Checkpoints("r", ThreadPublisher(store)).publish(3, 1, None)
    named(caught.value, "capture")
    assert store.list("runs") == []


def test_counts_that_do_not_add_up_are_found() -> None:
    bench = Bench()
    bench.control.check_conservation()
    bench.control.ledger.totals[COMPLETED] += 1
    with pytest.raises(LedgerInvalid) as caught:
        bench.control.check_conservation()
    named(caught.value, "conservation")


def test_going_on_too_far_past_the_last_checkpoint_is_refused() -> None:
    one: Any = SimpleNamespace(saved_step=3, upload_problem="no room", spec=SimpleNamespace(
        steps=SimpleNamespace(max_unsaved=2)))  # fmt: skip
    check_saved(one, 5)
    with pytest.raises(RestoreRefused, match="no room") as caught:
        check_saved(one, 6)
    named(caught.value, "unsaved")


async def test_a_redone_step_that_differs_stops_a_strict_run(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {1: SimpleNamespace(state_digest="a" * 64)}
    plan = SimpleNamespace(checkpoints=(), step=1, state_digest="a" * 64, steps=steps)

    async def answers(value: object) -> object:
        return value

    trainer = SimpleNamespace(
        claim=lambda caller: answers(SimpleNamespace(step=-1, state_digest="", clean=False, ahead_of="")),
        restore=lambda caller, plan: answers(SimpleNamespace(step=0, rejected=())),
        redo=lambda caller, step: answers(SimpleNamespace(state_digest="b" * 64, weights_digest="w")),
    )
    manager = SimpleNamespace(plan=lambda caller: answers(plan), redone=lambda *given: answers(False))
    one = SimpleNamespace(
        manager=manager, trainer=trainer, caller=SimpleNamespace(incarnation=1), saved_step=0,
        spec=SimpleNamespace(steps=SimpleNamespace(strict_redo=True, redo="replay")),
    )  # fmt: skip
    begin()
    monkeypatch.setattr(running, "session", lambda: one)
    with pytest.raises(RestoreRefused) as caught:
        await running.restore_trainer.fn()
    named(caught.value, "diverged")
    one.spec.steps.strict_redo = False
    assert (await running.restore_trainer.fn()).diverged == 1


async def test_weights_that_nobody_holds_any_more_are_unavailable() -> None:
    async def lost(digest: str) -> object:
        raise ActorLost("the trainer died", expected="a trainer", action="retry")

    with pytest.raises(WeightsUnavailable, match="the trainer died") as caught:
        await Fleet._fetch(cast("Fleet", SimpleNamespace(_weights=lost)), "abc")
    named(caught.value, "weights")


async def test_an_activation_that_no_engine_confirms_ends_with_what_they_do() -> None:
    policy = Policy(1, 4, "w")
    fleet: Any = SimpleNamespace(
        _settings=SimpleNamespace(activate_s=0.01), _policy=policy, names=(), _changed=Signal(),
        _manager=SimpleNamespace(callers=SimpleNamespace(alive=lambda: None)),
        _engines=[SimpleNamespace(kind="engine", index=0, state="starting")],
    )  # fmt: skip
    with pytest.raises(DeadlineExceeded, match="engine 0: starting") as caught:
        await Fleet._wait_serving(fleet, policy)
    named(caught.value, "activate")


def test_a_store_that_keeps_other_bytes_than_it_was_sent_is_unusable() -> None:
    store: Any = SimpleNamespace(url="s3://b", _get=lambda key, span: (b"other", ""))
    with pytest.raises(StorageUnusable) as caught:
        S3Store._check_stored(store, "k", b"sent", "checksum", {"ETag": '"none"'})
    named(caught.value, "upload_altered", 2)
    store._get = lambda key, span: (b"sent", "")
    S3Store._check_stored(store, "k", b"sent", "checksum", {"ETag": '"none"'})
