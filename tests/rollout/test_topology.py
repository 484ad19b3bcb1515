"""From which boundaries an attempt can go on, as far as rollout control can say."""

from __future__ import annotations

import pytest

from gpu.rollout.topology import Topology
from storage.ledger import Boundary, Requested

TOPOLOGY = Topology(modes={"book": "export_restore", "desk": "restart_only", "sums": "stateless"})
DONE, OPEN = Requested("desk", "d", 0, 1, b"1"), Requested("desk", "d", 0, 0, None)
LOOKED = Requested("desk", "d", 0, 0, b"1")


def boundary(revisions: dict[str, int] | None, *requests: Requested) -> Boundary:
    return Boundary(3, 1, 0, b"", 0, 0, 4, bool(requests), requests, revisions)


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (boundary({}), ""),
        (boundary({"book": 2, "sums": 1}), ""),
        (boundary({}, LOOKED), ""),
        (boundary({"desk": 1}), "restart_only: desk"),
        (boundary({}, DONE), "restart_only: desk"),
        (boundary({}, OPEN), "restart_only: desk"),
        (boundary(None), "unknown_dependencies"),
        (boundary({"bok": 1}), "resource_unknown: bok"),
    ],
)
def test_what_can_only_restart_or_is_not_known_starts_over_and_nothing_else(at: Boundary, why: str) -> None:
    assert TOPOLOGY.why_not_continuable(at) == why


def test_an_episode_that_can_only_restart_depends_on_itself() -> None:
    assert Topology("restart_only").why_not_continuable(boundary({})) == "restart_only: the episode"


def test_a_resource_of_another_name_mode_or_schema_is_another_topology() -> None:
    others = [
        Topology(modes={"books": "export_restore"}),
        Topology(modes={"book": "restart_only"}),
        Topology(modes={"book": "export_restore"}, schemas={"book": 2}),
    ]
    prints = {one.fingerprint() for one in (Topology(modes={"book": "export_restore"}), *others)}
    assert len(prints) == 4
    assert Topology().fingerprint() == "", "a run without resources is as it was before there were any"
