"""What the journal says about who owns a run, and what a host says about where its driver is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from gpu.fence import fence_of
from gpu.place import may_live, this_place
from storage.clock import SystemClock
from storage.journal import claim
from storage.memory import MemoryStore
from storage.runs import create_run, make_run

RUN = "fence"


def claimed(times: int) -> MemoryStore:
    store = MemoryStore()
    create_run(store, make_run(run=RUN, created=0.0, num_siblings=2, staleness=1, fingerprints={}, settings={}))
    for number in range(times):
        claim(store, RUN, 2, owner=f"flow-{number}", writer=f"w{number}", reason="test", clock=SystemClock())
    return store


@pytest.mark.parametrize("incarnation", [1, 2, 3])
def test_the_end_of_the_journal_says_whether_an_incarnation_is_the_newest(incarnation: int) -> None:
    fence = fence_of(claimed(3), RUN, incarnation)
    assert (fence is None) == (incarnation == 3)
    if fence is not None:
        assert "incarnation 3" in fence.found
        assert f"incarnation {incarnation} " in fence.expected


def test_a_run_without_a_journal_has_fenced_nobody() -> None:
    assert fence_of(claimed(0), RUN, 1) is None


def test_a_listing_that_is_old_does_not_hide_the_newer_incarnation() -> None:
    class Stale(MemoryStore):
        def list(self, prefix: str, after: str = "") -> list[str]:
            return sorted(super().list(prefix, after))[:1]

    store = claimed(0)
    store.__class__ = Stale
    for number in range(3):
        claim(store, RUN, 2, owner="flow", writer=f"w{number}", reason="test", clock=SystemClock())
    assert fence_of(store, RUN, 1) is not None


def test_only_a_driver_that_is_surely_dead_or_this_very_process_counts_as_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        there = f"{socket.gethostname()}:{process.pid}"
        assert may_live(there)
        process.kill()
    assert not may_live(there)
    assert not may_live(this_place())
    assert not may_live(""), "nobody ever drove"
    assert may_live(f"another-host:{os.getpid()}"), "what cannot be seen may live"
