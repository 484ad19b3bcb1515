"""The books of a run: the ledger and its journal, changed together and only together."""

from __future__ import annotations

from collections import OrderedDict

from storage.clock import Clock
from storage.journal import JournalWriter
from storage.ledger import Ledger
from storage.schema import Record
from storage.transitions import apply


class Books:
    """`record` is the only way anything durable changes. `hot` keeps copies of inline payloads within a byte bound."""

    def __init__(self, ledger: Ledger, journal: JournalWriter, clock: Clock, max_hot_bytes: int) -> None:
        self.ledger, self.journal, self.clock = ledger, journal, clock
        self.hot = HotBlocks(max_hot_bytes)
        ledger.idle_blocks.clear()

    def record(self, record: Record, blob: bytes | None = None) -> int:
        """Apply one transition and queue it for the journal; returns its sequence number. An illegal transition raises
        and changes neither."""
        apply(self.ledger, self.ledger.next_seq, record)
        seq = self.journal.append(record, blob)
        if self.ledger.idle_blocks:
            self.hot.drop(self.ledger.idle_blocks)
            self.ledger.idle_blocks.clear()
        return seq


class HotBlocks:
    """Bytes of payload blocks by name. The oldest spill when the bound is reached: they are read from storage then."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._blocks: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0
        self.spilled = 0

    def put(self, name: str, data: bytes) -> None:
        self._blocks[name] = data
        self.num_bytes += len(data)
        while self.num_bytes > self._max:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= len(oldest)
            self.spilled += 1

    def get(self, name: str) -> bytes | None:
        return self._blocks.get(name)

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.num_bytes -= len(self._blocks.pop(name, b""))
