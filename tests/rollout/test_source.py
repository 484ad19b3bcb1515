"""An ordinal means the same prompt for ever."""

from __future__ import annotations

import pytest

from gpu.rollout.backoff import Backoff
from gpu.rollout.source import PromptStream, rollout_seed
from storage.errors import ConfigurationRefused


def stream(seed: int = 1, shuffle: bool = True, epochs: int | None = None) -> PromptStream:
    return PromptStream(10, seed=seed, shuffle=shuffle, epochs=epochs)


def test_each_epoch_visits_every_row_once_in_its_own_seeded_order() -> None:
    epochs = [[stream().position(e * 10 + i) for i in range(10)] for e in range(3)]
    assert all(sorted(p.row for p in epoch) == list(range(10)) for epoch in epochs)
    assert [p.row for p in epochs[0]] != [p.row for p in epochs[1]]
    assert all(p.epoch == e for e, epoch in enumerate(epochs) for p in epoch)


def test_positions_do_not_depend_on_the_order_of_asking() -> None:
    one, other = stream(), stream()
    forward = [one.position(o) for o in range(40)]
    assert [other.position(o) for o in reversed(range(40))] == forward[::-1]
    assert [stream(seed=2).position(o) for o in range(40)] != forward


def test_without_shuffling_rows_come_in_order() -> None:
    assert [stream(shuffle=False).position(o).row for o in range(12)] == [*range(10), 0, 1]


def test_the_fingerprint_covers_content_order_seed_and_length() -> None:
    rows = [b"a", b"bc"]
    base = stream().fingerprint(rows)
    assert base == stream().fingerprint(list(rows))
    others = [
        stream().fingerprint([b"ab", b"c"]), stream().fingerprint(rows[::-1]), stream(seed=2).fingerprint(rows),
        stream(shuffle=False).fingerprint(rows), stream(epochs=1).fingerprint(rows),
    ]  # fmt: skip
    assert base not in others
    assert len(set(others)) == len(others)


def test_length_is_declared() -> None:
    assert stream().length is None
    assert stream(epochs=3).length == 30
    for size, epochs in ((0, None), (5, 0)):
        with pytest.raises(ConfigurationRefused):
            PromptStream(size, seed=0, shuffle=False, epochs=epochs)


def test_every_attempt_has_its_own_seed() -> None:
    seeds = {rollout_seed(r, o, s, a) for r in range(2) for o in range(20) for s in range(4) for a in range(3)}
    assert len(seeds) == 2 * 20 * 4 * 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_backoff_grows_is_bounded_in_time_and_in_places() -> None:
    backoff = Backoff(1.0, 5.0, places=2)
    backoff.put(1, 1, now=0.0)
    backoff.put(2, 3, now=0.0)
    assert backoff.release_due(0.9) == []
    assert backoff.release_due(1.0) == [1]
    assert backoff.next_due() == 4.0
    backoff.put(3, 9, now=0.0)
    backoff.put(4, 1, now=0.0)
    assert 4 not in backoff, "with every place taken the first to be due does not wait"
    assert len(backoff) == 2
    assert backoff.release_due(5.0) == [2, 3]
