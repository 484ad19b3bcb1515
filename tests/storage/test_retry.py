"""A write whose outcome is unknown is repeated until it is known, and says so meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from storage.clock import VirtualClock
from storage.errors import ArtifactCorrupt, CommitUnknown, StoreUnavailable, TidegateError
from storage.filesystem import Bytes
from storage.memory import MemoryStore
from storage.quarantine import release_by_claim
from storage.retry import create_until_known
from tests.rollout.building import RUN, Bench


class Moody(MemoryStore):
    """Fails as told, before or after the write took place."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[TidegateError] = []
        self.after: list[TidegateError] = []

    def create(self, key: str, data: Bytes) -> None:
        if self.before:
            raise self.before.pop()
        super().create(key, data)
        if self.after:
            raise self.after.pop()


def down() -> StoreUnavailable:
    return StoreUnavailable("no answer", expected="a store", action="wait")


def unknown() -> CommitUnknown:
    return CommitUnknown("the reply is lost", expected="a reply", action="repeat")


@pytest.mark.parametrize(
    ("before", "after", "tries"),
    [([], [], 1), ([down(), down()], [], 3), ([], [unknown()], 2), ([down()], [unknown()], 3)],
)
def test_a_write_is_repeated_until_its_outcome_is_known(
    before: list[TidegateError], after: list[TidegateError], tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, slept = Moody(), list[float]()
    store.before, store.after = list(before), list(after)
    with caplog.at_level(logging.WARNING):
        assert create_until_known(store, "a", b"1", slept.append) == tries
    assert store.read("a") == b"1"
    assert slept == sorted(slept)
    assert len(slept) == tries - 1 == caplog.text.count("op=write what=a")


def test_another_content_under_the_name_is_an_error() -> None:
    store = Moody()
    store.create("a", b"other")
    with pytest.raises(ArtifactCorrupt, match="other content"):
        create_until_known(store, "a", b"1", lambda seconds: None)


@pytest.mark.parametrize("fault", [down, unknown])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_release_by_a_claim_survives_a_store_that_is_away(fault: Callable[[], TidegateError], when: str) -> None:
    store, slept = Moody(), list[float]()
    bench = Bench(store=store, max_attempts=1)
    for dispatch in bench.control.take("w", 100):
        if dispatch.identity.group == 0:
            bench.fail(dispatch)
    bench.flush()
    claimed = store.create

    def create(key: str, data: Bytes) -> None:
        """The claim itself works; what follows it fails once."""
        claimed(key, data)
        store.create = claimed  # type: ignore[method-assign]
        getattr(store, when).append(fault())

    store.create = create  # type: ignore[method-assign]
    release_by_claim(store, RUN, [0], VirtualClock(), slept.append)
    assert len(slept) == 1
    again = Bench(store=store, created=True, max_attempts=1)
    assert 0 not in again.control.ledger.quarantined
