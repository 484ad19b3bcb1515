"""What a worker says at once."""

from __future__ import annotations

from typing import Any

from gpu.environments.resources import Reply
from gpu.environments.reverse import ReverseLetters
from gpu.environments.tools import Exported
from gpu.generation.worker import MAX_REPORT, RolloutWorker
from gpu.models.tokenizer import CharTokenizer
from gpu.rollout import messages
from storage.ledger import Export
from storage.memory import MemoryStore
from tests.gpu.agents import Sink, agent, dispatch, scripted

NOBODY: Any = None


async def test_an_export_is_never_reported_without_its_turn() -> None:
    worker = RolloutWorker(
        "w", 1, NOBODY, lambda name: NOBODY, ReverseLetters(), CharTokenizer(), MemoryStore(), "run", seed=0,
        temperature=1.0, position=lambda ordinal: 0, concurrency=1, suites=lambda one: NOBODY,
    )  # fmt: skip
    sink = Sink()
    await agent(ReverseLetters(), scripted("a"), sink).run(dispatch(), [])
    turned = sink.records[-1][1]
    for number in range(MAX_REPORT - 1):
        worker.result(dispatch(), 0, number, "notes", "d", Reply(b"1", 1))
    exports = [Exported("notes", Export(1, b"x")), Exported("book", Export(1, b"y"))]
    worker.turn(dispatch(), 1, turned, b"", {"notes": 1, "book": 1}, exports)
    worker.result(dispatch(), 2, 0, "notes", "d", Reply(b"1", 2))
    first, second = worker._batch(), worker._batch()
    assert [type(out.entry) for out in first[-3:]] == [messages.Exported, messages.Exported, messages.Turn]
    assert [type(out.entry) for out in second] == [messages.Result]
    assert worker._out == []
