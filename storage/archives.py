"""Names of history archives: which slots of the journal one holds, and the sha256 of its bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from storage.errors import ArtifactCorrupt

_NAME = re.compile(r"(\d{12})-(\d{12})-([0-9a-f]{64})")


class Archive(NamedTuple):
    """Slots [first, end) of the journal in one object."""

    first: int
    end: int
    digest: str

    @property
    def name(self) -> str:
        return f"{self.first:012d}-{self.end:012d}-{self.digest}"

    @classmethod
    def of(cls, name: str) -> Archive:
        """Raises `ArtifactCorrupt`."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ArtifactCorrupt(
                f"a history archive {name!r}",
                expected="<first slot>-<slot after the last>-<sha256>",
                action="the journal was altered; `tidegate fork RUN NEW --last-good`",
                code="format",
            )
        return cls(int(found[1]), int(found[2]), found[3])


def whole(history: Sequence[str], end: int) -> bool:
    """Whether the archives hold each slot below `end` once, in order."""
    archives = [Archive.of(name) for name in history]
    starts = [0, *(one.end for one in archives)]
    return all(one.first == start < one.end for one, start in zip(archives, starts, strict=False)) and starts[-1] == end


def end_of(history: Sequence[str]) -> int:
    """The first slot that is in no archive."""
    return Archive.of(history[-1]).end if history else 0


def amended(history: Sequence[str], archive: str) -> list[str]:
    """`history` after `archive` took the place of everything from its first slot on."""
    first = Archive.of(archive).first
    return [*(name for name in history if Archive.of(name).first < first), archive]
