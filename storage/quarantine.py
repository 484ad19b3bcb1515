"""Releasing quarantined groups, live and in a run that nobody drives."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from storage import schema
from storage.clock import Clock
from storage.errors import QuarantineRefused
from storage.filesystem import Store
from storage.journal import JournalWriter, claim, store_frozen
from storage.ledger import Ledger
from storage.retry import until_known
from storage.runs import open_run
from storage.transitions import apply


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
    info, writer = open_run(store, run), uuid.uuid4().hex[:12]
    wanted = list(dict.fromkeys(ordinals))
    claimed = claim(
        store, run, info.num_siblings, owner="quarantine", writer=writer, reason="release quarantined groups",
        clock=clock, check=lambda ledger: check_release(ledger, wanted),
    )  # fmt: skip
    journal = JournalWriter(run, claimed.incarnation, writer, claimed.tail, clock)
    for ordinal in wanted:
        record = schema.QuarantineReleased(ordinal)
        apply(claimed.ledger, claimed.ledger.next_seq, record)
        journal.append(record)
    frozen = journal.freeze()
    until_known("the release", lambda: store_frozen(store, run, claimed.incarnation, frozen), sleep)
    return claimed.incarnation
