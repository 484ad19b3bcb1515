"""Releasing quarantined groups, live and in a run that nobody drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from storage import schema
from storage.by_claim import record_by_claim
from storage.clock import Clock
from storage.errors import QuarantineRefused
from storage.filesystem import Store
from storage.ledger import Ledger


def check_release(ledger: Ledger, ordinals: Sequence[int]) -> None:
    """Raises `QuarantineRefused` unless every one of the groups is quarantined, in a run that goes on."""
    strangers = [ordinal for ordinal in ordinals if ordinal not in ledger.quarantined]
    if strangers or ledger.finished or not ordinals:
        raise QuarantineRefused(
            "the run is finished" if ledger.finished else f"groups {strangers[:10]} are not quarantined",
            expected=f"groups of a run that goes on, out of {sorted(ledger.quarantined)[:20]}",
            action="look at `tidegate quarantine list RUN`",
        )


def release_by_claim(
    store: Store, run: str, ordinals: Sequence[int], clock: Clock, sleep: Callable[[float], None]
) -> int:
    """Claim the run's next incarnation only to release groups; returns that incarnation. A manager that lives somewhere
    is fenced by it. Raises `QuarantineRefused`, having written nothing, and what claiming raises."""
    wanted = list(dict.fromkeys(ordinals))
    records = [schema.QuarantineReleased(ordinal) for ordinal in wanted]
    reason = "release quarantined groups"
    return record_by_claim(store, run, records, reason, lambda ledger: check_release(ledger, wanted), clock, sleep)
