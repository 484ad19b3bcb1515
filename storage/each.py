"""The same call for many items, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
AT_ONCE = 4
"""Four objects in flight came closest to what S3 stores take; more only wait for each other."""


def each(act: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """`act` of every item, in order. After an error, what has not begun does not begin; the first error is raised."""
    if len(items) == 1:
        return [act(items[0])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        calls = [pool.submit(act, item) for item in items]
        try:
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()
