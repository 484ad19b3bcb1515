"""Records that a person makes in a run that nobody drives."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from storage.clock import Clock
from storage.filesystem import Store
from storage.journal import JournalWriter, claim, store_frozen
from storage.ledger import Ledger
from storage.retry import until_known
from storage.runs import open_run
from storage.schema import Record
from storage.transitions import apply


def record_by_claim(
    store: Store,
    run: str,
    records: Sequence[Record],
    reason: str,
    check: Callable[[Ledger], None],
    clock: Clock,
    sleep: Callable[[float], None],
) -> int:
    """Claim the run's next incarnation only to make these records; returns that incarnation. A manager that lives
    somewhere is fenced by it. Raises what `check` raises for the ledger, having written nothing, and what claiming
    raises."""
    info, writer = open_run(store, run), uuid.uuid4().hex[:12]
    claimed = claim(
        store, run, info.num_siblings, owner="person", writer=writer, reason=reason, clock=clock, check=check
    )
    journal = JournalWriter(run, claimed.incarnation, writer, claimed.tail, clock)
    for record in records:
        apply(claimed.ledger, claimed.ledger.next_seq, record)
        journal.append(record)
    frozen = journal.freeze()
    until_known(reason, lambda: store_frozen(store, run, claimed.incarnation, frozen), sleep)
    return claimed.incarnation
