"""From turn rows to what a trainer needs: `assemble` joins the rows of a finished group, or says why it cannot.

Parent identity survives: a group comes out as exactly its sibling slots, in order, and every sample of a slot carries
that slot's identity. Most slots have one sample; one whose context was replaced on the way has several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import ReferenceInvalid
from storage.ledger import next_samples
from storage.payload import TurnRow, VersionSpan


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample of rollout (`group`, `sibling`), its `index`-th; `attempt` sealed the rollout and `reward` is
    the rollout's. Arrays have one value per token of the sample's conversation [T]: ids int32, behaviour logprobs
    float32, mask int8 (1 = generated). `spans` count generated tokens."""

    group: int
    sibling: int
    attempt: int
    index: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.int8]
    spans: tuple[VersionSpan, ...]
    reward: float


def assemble(slots: Sequence[Sequence[TurnRow]], group: int, num_siblings: int) -> list[list[Sample]]:
    """The samples of each sibling slot of a finished group, in slot order; `slots` are the rows of each.

    Raises `ReferenceInvalid`: `slots` when they are not `num_siblings`, and what `assemble_slot` raises."""
    if len(slots) != num_siblings:
        raise misfit(f"group {group}", f"{len(slots)} sibling slots", f"{num_siblings} of them", "slots")
    return [assemble_slot(rows, group, sibling) for sibling, rows in enumerate(slots)]


def assemble_slot(rows: Sequence[TurnRow], group: int, sibling: int) -> list[Sample]:
    """Join the turns of one finished rollout into its samples, at least one. Raises `ReferenceInvalid`:

    missing         no rows, or the last one is not the end
    conflict        a row of another rollout, or of an older attempt than the one before
    gap, overlap    a turn or a sample is left out, or comes again
    prefix          a turn that does not begin where its sample ends
    prompt, empty   a sample without a prompt of its own, a turn without a generated token
    row_digest, span   columns or version spans that do not fit the tokens
    """
    where = f"rollout {group}/{sibling}"
    if not rows:
        raise misfit(where, "no rows", "one row per turn", "missing")
    samples: list[list[TurnRow]] = []
    position, attempt, turn, told = 0, -1, -1, True
    for row in rows:
        told, before = row.is_account, told
        turn += not told
        _check_owner(row, where, group, sibling, turn, attempt)
        if told:
            _check_account(row, where, before=before, position=position, sample=len(samples) - 1)
            attempt = row.attempt
            continue
        _check_columns(row, where)
        _check_sample(row, where, len(samples) - 1)
        if row.sample == len(samples):
            samples.append([])
            position = 0
        if row.start != position:
            raise misfit(where, f"turn {turn} at token {row.start} of its sample", f"token {position}", "prefix")
        samples[-1].append(row)
        position += len(row.tokens)
        attempt = row.attempt
    if not rows[-1].done or any(row.done for row in rows[:-1]):
        raise misfit(where, "the last turn is not the end", "exactly the last turn to be done", "missing")
    return [_join(index, turns, rows[-1]) for index, turns in enumerate(samples)]


def _check_account(row: TurnRow, where: str, *, before: bool, position: int, sample: int) -> None:
    """An account follows the tokens of its turn, once."""
    if before:
        raise misfit(where, f"an account of turn {row.turn} without its tokens", "the tokens before it", "empty")
    if (row.start, row.sample) != (position, sample) or len(row.logprobs) or len(row.mask) or row.spans:
        found = f"an account of turn {row.turn} at token {row.start} of sample {row.sample}, with columns or spans"
        raise misfit(where, found, f"an empty row at token {position} of sample {sample}", "prefix")


def _join(index: int, turns: Sequence[TurnRow], last: TurnRow) -> Sample:
    """`turns` of one sample; `last` ended the rollout."""
    before = accumulate((row.num_generated for row in turns), initial=0)
    return Sample(
        last.group,
        last.sibling,
        last.attempt,
        index,
        _joined([row.tokens for row in turns]),
        _joined([row.logprobs for row in turns]),
        _joined([row.mask for row in turns]),
        tuple(
            span._replace(end=start + span.end) for start, row in zip(before, turns, strict=False) for span in row.spans
        ),
        last.reward,
    )


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_owner(row: TurnRow, where: str, group: int, sibling: int, turn: int, attempt: int) -> None:
    if (row.group, row.sibling) != (group, sibling):
        raise misfit(where, f"a row of {row.group}/{row.sibling}", "its own rows", "conflict")
    if row.turn != turn:
        raise misfit(where, f"turn {row.turn}", f"turn {turn}", "gap" if row.turn > turn else "overlap")
    if row.attempt < attempt:
        raise misfit(where, f"attempt {row.attempt} after {attempt}", "attempts that do not go back", "conflict")


def _check_columns(row: TurnRow, where: str) -> None:
    if not len(row.tokens) == len(row.logprobs) == len(row.mask):
        raise misfit(where, "token columns of different lengths", "one logprob and mask per token", "row_digest")
    generated = row.num_generated
    if not generated:
        raise misfit(where, f"turn {row.turn} without a generated token", "at least one", "empty")
    check_spans(row.spans, generated, where)


def _check_sample(row: TurnRow, where: str, sample: int) -> None:
    """`sample` is open, -1 when none is. The row extends it or opens the next, with a token before the first generated
    one to predict it from."""
    allowed = next_samples(sample)
    if row.sample not in allowed:
        found, expected = f"turn {row.turn} of sample {row.sample}", f"sample {' or '.join(map(str, allowed))}"
        raise misfit(where, found, expected, "gap" if row.sample > sample else "overlap")
    if row.sample > sample and row.mask[0]:
        raise misfit(where, f"sample {row.sample} begins with a generated token", "a prompt of its own", "prompt")


def check_spans(spans: Sequence[VersionSpan], generated: int, where: str) -> None:
    """Spans must cover the generated tokens exactly and never go back in version."""
    ends = [0, *(span.end for span in spans)]
    order = [(span.incarnation, span.number) for span in spans]
    if ends[-1] != generated or any(a >= b for a, b in pairwise(ends)) or order != sorted(order):
        raise misfit(
            where, f"version spans {spans}", f"spans over {generated} tokens in ascending version order", "span"
        )


def misfit(where: str, found: str, expected: str, code: str) -> ReferenceInvalid:
    return ReferenceInvalid(
        f"{where}: {found}", expected=expected, action="the payload does not belong together; run verify", code=code
    )
