"""Where a later revision of the schema says how an earlier one is read.

A revision is (number, hash of names, fields and types), and each kind of object has its own. What was written in an
older one is changed record by record while it is read; objects stay as they are, and new ones are written in the
revision of this program. The first released schema is 1; what came before it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from storage.errors import SchemaUnsupported

Revision = tuple[object, object]
Change = Callable[[str, Any], tuple[str, Any]]


class Upgrade(NamedTuple):
    """`change` turns (kind, decoded content) of one revision into those of revision `to`, the next.

    Kinds are those of the journal's records, and "header" of a segment, "run" of run.json, "manifest" of a checkpoint,
    "turn" of a row of a block, and those of a ledger snapshot's rows; their content is dicts, or lists where a snapshot
    encodes by position.
    """

    to: Revision
    change: Change


UPGRADES: dict[Revision, Upgrade] = {}


def changes(where: str, found: Revision, current: Revision) -> list[Change]:
    """What leads from revision `found` of the object `where` to the current one, in order: nothing when it is that.
    Raises `SchemaUnsupported`."""
    steps: list[Change] = []
    at = found
    while at != current:
        upgrade = UPGRADES.get(at)
        if upgrade is None:
            raise SchemaUnsupported(
                f"{where}: schema {found[0]}, fields {found[1]}",
                expected=" or ".join(_text(one) for one in (current, *_older(current))),
                action="read this run with the Tidegate version that wrote it; nothing was changed",
            )
        steps.append(upgrade.change)
        at = upgrade.to
    return steps


def changed(steps: list[Change], kind: str, content: Any) -> tuple[str, Any]:
    for step in steps:
        kind, content = step(kind, content)
    return kind, content


def _older(current: Revision) -> list[Revision]:
    """The revisions from which upgrades lead to the current one."""

    def leads(at: Revision) -> bool:
        while at in UPGRADES:
            at = UPGRADES[at].to
        return at == current

    return [revision for revision in UPGRADES if leads(revision)]


def _text(revision: Revision) -> str:
    return f"schema {revision[0]}, fields {revision[1]}"
