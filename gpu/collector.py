"""The garbage collector of a process that only keeps books."""

from __future__ import annotations

import gc

YOUNG = 20_000


def tune_collector() -> None:
    """Look for reference cycles less often: a manager's records, groups and identities form none, and each look walks
    over all that are young. What was imported so far is left out for good."""
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 50)
