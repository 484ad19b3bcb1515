"""Thousands of seeded worlds: reserve, finish, fail, hold, lease, kill, race, alter and restore, in virtual time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.rollout.calls import Callers
from gpu.rollout.messages import Accepted, Identity, Report
from gpu.rollout.results import Results
from storage import journal, payload, reader, segment
from storage.errors import TidegateError
from storage.history import read_all
from storage.ledger import Rollout, RolloutState
from storage.memory import MemoryStore
from tests.simulation import __main__ as runner
from tests.simulation import memo, oracle
from tests.simulation.actors import Actor, Actors
from tests.simulation.campaign import Failure, missing, play_all, play_seeds
from tests.simulation.incarnations import RUN
from tests.simulation.outside import Box
from tests.simulation.shapes import SHAPES
from tests.simulation.workers import Running
from tests.simulation.world import World, play

WORLDS = int(os.environ.get("TIDEGATE_SIMULATIONS", "3200"))
"""Worlds in all: half of them tiny, one of sixteen large."""
SEEDS = {"tiny": WORLDS // 2, "small": WORLDS // 2 - WORLDS // 16, "large": WORLDS // 16}


@pytest.mark.parametrize("size", sorted(SHAPES))
def test_every_interleaving_settles_each_ordinal_once_and_makes_progress(size: str) -> None:
    totals: Counter[str] = Counter()
    failures: list[Failure] = []
    for part in play_all(size, range(SEEDS[size]), None):
        totals += part.totals
        failures += part.failures
        if failures:
            break
    assert not failures, failures[0]
    # The worlds would prove nothing if their faults did not happen.
    assert not missing(size, totals)


def test_a_run_without_faults_needs_one_incarnation_and_regenerates_nothing() -> None:
    for seed in range(10):
        report = World(seed, length=12).run(chaos=0)
        assert (report.incarnations, report.rollouts_regenerated, report.steps_redone) == (1, 0, 0)


@pytest.mark.parametrize("size", sorted(SHAPES))
def test_a_seed_reproduces_its_interleaving_exactly(size: str) -> None:
    assert fingerprint(77, size) == fingerprint(77, size)
    assert fingerprint(77, size) != fingerprint(78, size)


def test_a_seed_reproduces_in_another_process_and_after_other_worlds() -> None:
    """Nothing is drawn from hashes, from the order of a set, or from what was played before."""
    play_seeds("small", range(20))
    program = "from tests.simulation.test_simulation import fingerprint; print(fingerprint(77, 'small'))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == fingerprint(77, "small")


def fingerprint(seed: int, size: str) -> str:
    """The whole journal of a world ends in this digest: each segment holds the one before."""
    world, _ = play(seed, SHAPES[size])
    *_, last = read_all(world.store, RUN)
    return f"{last.header.slot}:{last.digest}"


# ---------------------------------------------------------------------- broken code must be found


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    memo.forget()


def broken(size: str = "small", seeds: range = range(300)) -> str:
    """What the worlds say of code that was broken; fails when they say nothing."""
    for seed in seeds:
        part = play_seeds(size, range(seed, seed + 1))
        if part.failures:
            return part.failures[0].trace
    return pytest.fail(f"{len(seeds)} worlds did not notice")


def test_worlds_notice_a_writer_that_takes_any_full_slot_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = journal.store_frozen

    def careless(store: journal.Store, run: str, incarnation: int, frozen: journal.Frozen) -> None:
        try:
            whole(store, run, incarnation, frozen)
        except (journal.RunFenced, journal.TwoOwners):
            return

    monkeypatch.setattr(journal, "store_frozen", careless)
    assert broken()


def test_worlds_notice_a_store_that_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(store: MemoryStore, key: str, data: bytes) -> None:
        store.delete([key])
        store._objects[key] = bytes(data)

    monkeypatch.setattr(MemoryStore, "create", overwrite)
    assert broken()


def test_worlds_notice_a_claim_that_keeps_the_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = journal.claim

    def again(*args: object, **settings: object) -> journal.Claimed:
        claimed = whole(*args, **settings)  # type: ignore[arg-type]
        return claimed._replace(incarnation=max(1, claimed.incarnation - 1))

    monkeypatch.setattr(journal, "claim", again)
    assert "two claimants got one incarnation" in broken()


def test_worlds_notice_segments_that_are_read_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "check_digest", lambda data, where: segment._DIGEST.search(data).group(1).decode())
    assert broken()


def test_worlds_notice_blocks_that_are_read_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(data: bytes, digest: str, where: str) -> list[payload.TurnRow]:
        return payload.decode_block(data, hashlib.sha256(data).hexdigest(), where)

    monkeypatch.setattr(reader, "decode_block", unchecked)
    assert broken("large", range(40))


def test_worlds_notice_a_manager_that_serves_a_replaced_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Callers, "check", lambda self, caller: None)
    assert broken()


def test_worlds_notice_a_late_result_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(self: Results, identity: Identity) -> Rollout | None:
        group = self._books.ledger.groups.get(identity.group)
        rollout = group.rollouts[identity.sibling] if group else None
        return rollout if rollout and rollout.state is RolloutState.LIVE else None

    monkeypatch.setattr(Results, "_current", current)
    assert broken("large", range(20, 60))


def test_worlds_notice_a_worker_that_does_not_wait_for_its_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actor, "_durable", lambda self: self._settled is not None)
    assert "only when its intent is durable" in broken()


def test_worlds_notice_a_lost_session_whose_open_request_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Box, "replayable", True)  # which it is not
    assert "each request takes effect once" in broken("large", range(60))


def test_worlds_notice_an_intent_that_is_refused_and_acted_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(self: Actors, report: Report, accepted: Accepted, running: list[Running]) -> list[Running]:
        self.settle(report, accepted, running)
        return []

    monkeypatch.setattr(Actors, "told", told)
    assert "only when its intent is durable" in broken("large", range(60))


# ---------------------------------------------------------------------- the runner


def broken_oracle(*state: object) -> None:
    raise AssertionError("broken on purpose")


def test_a_failing_seed_names_the_command_that_plays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(oracle, "check", broken_oracle)
    assert runner.main(["--seeds", "4711:4712", "--jobs", "1"]) == 1
    assert "python -m tests.simulation --seeds 4711:4712 --world small" in capsys.readouterr().out


def test_a_claimant_tells_a_removed_segment_from_the_end() -> None:
    world = World(3, length=2)
    world.run(chaos=0)
    world.store.alter(world.store.keys("/journal/")[1], None)
    with pytest.raises(TidegateError):
        journal.claim(world.store, RUN, 1, owner="sim", writer="late", reason="x", clock=world.clock)
