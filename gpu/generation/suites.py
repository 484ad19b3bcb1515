"""A worker's side of evaluation: agents of the suites, made at their first dispatch, and the ends of plain attempts.

Their turns are counted and dropped: a plain result is a reward, a number of tokens and the versions behind them.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu.environments.agent import Agent, RolloutSink
from gpu.rollout.messages import Dispatch, Identity, Outcome, PlainEnded
from storage.payload import TurnRow

MakeAgent = Callable[[str, RolloutSink], Agent]
"""The agent of a suite by its name, with the sink it reports to."""


class Suites:
    """Runs plain dispatches. `ended` takes what is to be reported."""

    def __init__(self, make: MakeAgent, ended: Callable[[PlainEnded], None]) -> None:
        self._make, self._ended = make, ended
        self._agents: dict[str, Agent] = {}
        self._turns: dict[Identity, list[TurnRow]] = {}

    async def run(self, dispatch: Dispatch) -> None:
        """One attempt, from scratch."""
        assert dispatch.plain is not None, "a plain dispatch"
        name = dispatch.plain.suite
        agent = self._agents.get(name)
        if agent is None:
            agent = self._agents[name] = self._make(name, self)
        try:
            await agent.run(dispatch, ())
        finally:
            self._turns.pop(dispatch.identity, None)

    def turn(self, dispatch: Dispatch, boundary: int, row: TurnRow, state: bytes) -> None:
        self._turns.setdefault(dispatch.identity, []).append(row)

    def end(self, dispatch: Dispatch, row: TurnRow) -> None:
        rows = [*self._turns.get(dispatch.identity, ()), row]
        numbers = [span.number for row in rows for span in row.spans]
        tokens = sum(row.num_generated for row in rows)
        self._ended(PlainEnded(dispatch.identity, Outcome.SEALED, tokens, min(numbers), max(numbers), row.reward))
