"""Where the keys of a store come from: the environment, or a named source that each process asks for itself.

Only the name travels (in a storage url, a run's parameters, an actor's arguments); the keys never leave the process
that asked. A source is an entry point of the group `tidegate.credentials`: a function from a name to `Credentials`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import NoReturn, cast

from storage.errors import StorageUnusable

GROUP = "tidegate.credentials"


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Keys of one identity. They are neither shown nor pickled."""

    key: str
    secret: str
    token: str | None = None

    def __repr__(self) -> str:
        return "Credentials(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("credentials are not pickled: send the name of their source")


def resolve(reference: str) -> Credentials:
    """The keys behind `<source>:<name>`, asked for now. Raises `StorageUnusable`."""
    source, _, name = reference.partition(":")
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if source not in found or not name:
        raise StorageUnusable(
            f"credentials {reference!r}",
            expected=f"<source>:<name> with a source of {', '.join(sorted(found)) or 'none installed'}",
            action="correct the storage url, or leave credentials out to use the environment",
            code="credentials",
        )
    load = cast("Callable[[str], Credentials]", found[source].load())
    return load(name)
