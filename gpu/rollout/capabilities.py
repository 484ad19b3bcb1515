"""What a source declares that it can do, and whether a run may own its groups. Asked, never guessed from a class."""

from __future__ import annotations

from typing import NamedTuple

from storage.errors import ConfigurationRefused


class Capabilities(NamedTuple):
    """`finite`: it ends by itself. `reservable`: a group can be handed out again until it is settled. `resumable`: its
    position survives a restart."""

    finite: bool
    reservable: bool
    resumable: bool


def is_owned(source: Capabilities, executing: int | None, retained: int | None, completed: int | None) -> bool:
    """Owned mode: the source is reservable and E, R and P are all set. None of them set is plain mode.

    Raises `ConfigurationRefused` for some but not all, and for any on a source that cannot reserve."""
    given = {"executing (E)": executing, "retained (R)": retained, "completed (P)": completed}
    unset = [name for name, value in given.items() if value is None]
    set_ = [name for name in given if name not in unset]
    if set_ and not source.reservable:
        raise ConfigurationRefused(
            f"{', '.join(set_)} set for a source that cannot reserve: there is nothing to own",
            expected="executing, retained and completed all null for such a source",
            action="set them to null, or take a source that can reserve",
            code="capability",
        )
    if set_ and unset:
        raise ConfigurationRefused(
            f"{', '.join(unset)} = null while {', '.join(set_)} is set: groups would be owned by halves",
            expected="executing, retained and completed all set (owned) or all null (plain)",
            action="set the missing ones, or set all three to null",
            code="capability",
        )
    return not unset


def check_trainable(
    source: Capabilities, executing: int | None, retained: int | None, completed: int | None
) -> tuple[int, int, int]:
    """Training needs receipts: an owned, resumable source. Returns E, R and P. Raises `ConfigurationRefused`."""
    owned = is_owned(source, executing, retained, completed)
    if not owned or executing is None or retained is None or completed is None:
        why = "executing, retained and completed are null" if source.reservable else "the source cannot reserve"
        raise ConfigurationRefused(
            f"a training run in plain mode: {why}, so no receipt would say which groups were trained",
            expected="a reservable source with executing, retained and completed set",
            action="set the three capacities, or take a source that can reserve",
            code="needs_receipts",
        )
    if not source.resumable:
        raise ConfigurationRefused(
            "a training run on a source that cannot resume: after a crash nobody could say what it handed out",
            expected="a resumable source",
            action="take another source",
            code="needs_receipts",
        )
    return executing, retained, completed
