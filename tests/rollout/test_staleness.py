"""The deadline rule keeps the bound whatever the finish order, and never paints itself into a corner."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.rollout.staleness import room, select


@settings(max_examples=300)
@given(
    staleness=st.integers(0, 4), batch=st.integers(1, 4), executing=st.integers(1, 12), lag=st.booleans(),
    seed=st.integers(0, 2**32), order=st.sampled_from(["fifo", "lifo"]),
)  # fmt: skip
def test_any_finish_order_trains_every_group_within_the_bound(
    staleness: int, batch: int, executing: int, lag: bool, seed: int, order: str
) -> None:
    """Admit whenever allowed, finish in random order, train whenever allowed: each batch is in time, and it goes on."""
    choices = random.Random(seed)
    version, serving, next_ordinal = 0, 0, 0
    oldest: dict[int, int] = {}
    live: set[int] = set()
    done: list[int] = []
    trained = 0
    while trained < 20 * batch:
        serving = choices.randint(serving, version) if lag else version
        while len(live) < executing and room(Counter(oldest.values()), staleness, batch, version, serving):
            oldest[next_ordinal] = serving
            live.add(next_ordinal)
            next_ordinal += 1
        assert len(oldest) <= batch * (staleness + 1)
        finishing = choices.sample(sorted(live), choices.randint(0, len(live)))
        live.difference_update(finishing)
        done += finishing
        ready = [(ordinal, oldest[ordinal]) for ordinal in (done if order == "fifo" else done[::-1])]
        found = select(ready, [(ordinal, oldest[ordinal]) for ordinal in live], staleness, batch, version)
        assert found.overdue == (), "pacing never wastes finished work"
        if found.chosen is None:
            serving = version if not live else serving
            assert live or len(done) < batch, "with nothing left to finish a batch must be possible"
            continue
        assert len(set(found.chosen)) == batch
        for ordinal in found.chosen:
            assert 0 <= version - oldest.pop(ordinal) <= staleness
            done.remove(ordinal)
        trained += batch
        version += 1


def test_on_policy_admits_exactly_one_batch_per_version() -> None:
    counts: Counter[int] = Counter()
    for _ in range(3):
        assert room(counts, 0, 3, 7, 7)
        counts[7] += 1
    assert not room(counts, 0, 3, 7, 7)
    assert not room(Counter(), 0, 3, 7, 6), "tokens of version 6 can no longer be trained at 7"


def test_a_batch_waits_for_the_group_at_its_deadline_and_names_it() -> None:
    found = select([(1, 5), (2, 5)], [(0, 3)], 2, 2, version=5)
    assert found.chosen is None
    assert found.culprits == (0,)
    assert "deadline at version 5" in found.reason


def test_groups_that_would_be_late_next_time_go_first() -> None:
    # At version 5 with B = 1, S = 1: one group of version 4 must go now.
    assert select([(9, 5), (3, 4)], [], 1, 1, version=5).chosen == (3,)
    # A batch also waits when too many would be due at the next version.
    found = select([(9, 6)], [(3, 5), (4, 5)], 1, 1, version=5)
    assert found.chosen is None
    assert set(found.culprits) == {3, 4}


def test_excess_beyond_a_lowered_bound_is_overdue() -> None:
    found = select([(1, 2), (2, 4), (3, 4)], [], 1, 2, version=4)
    assert found.overdue == (1,)
    assert found.chosen == (2, 3)


def test_unbounded_staleness_is_completion_order() -> None:
    assert select([(5, 0), (1, 9), (3, 2)], [(0, 0)], None, 2, version=50).chosen == (5, 1)
    assert room(Counter({0: 1000}), None, 1, 50, 0)
