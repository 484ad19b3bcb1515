"""From turn rows to the samples of sibling slots: whatever was written comes back, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import ReferenceInvalid
from storage.payload import TurnRow, VersionSpan, decode_block, encode_block
from storage.samples import Sample, assemble, assemble_slot

GROUP = 4


def row(turn: int = 0, start: int = 0, done: bool = True, **changes: object) -> TurnRow:
    made = TurnRow(
        GROUP, 1, 0, turn, 0, start, np.array([5, 6, 7], np.int32), np.array([0, -0.5, -0.25], np.float32),
        np.array([0, 1, 1], np.int8), (VersionSpan(1, 3, 1), VersionSpan(1, 4, 2)), done, 0.5, "",
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_turns_join_into_one_sample() -> None:
    turns = [row(done=False), row(turn=1, start=3, attempt=1, spans=(VersionSpan(2, 4, 2),))]
    (sample,) = assemble_slot(turns, GROUP, 1)
    assert sample.tokens.tolist() == [5, 6, 7, 5, 6, 7]
    assert sample.mask.tolist() == [0, 1, 1, 0, 1, 1]
    assert sample.spans == (VersionSpan(1, 3, 1), VersionSpan(1, 4, 2), VersionSpan(2, 4, 4))
    assert (sample.group, sample.sibling, sample.attempt, sample.index, sample.reward) == (GROUP, 1, 1, 0, 0.5)


def test_every_sample_of_a_slot_carries_the_slots_identity_attempt_and_reward() -> None:
    turns = [
        row(done=False),
        row(turn=1, start=3, done=False, spans=(VersionSpan(1, 4, 2),)),
        row(turn=2, sample=1, done=False, spans=(VersionSpan(1, 4, 2),)),
        row(turn=3, sample=2, attempt=1, spans=(VersionSpan(2, 4, 2),), reward=0.25),
    ]
    samples = assemble_slot(turns, GROUP, 1)
    assert [(s.group, s.sibling, s.attempt, s.index, s.reward) for s in samples] == [
        (GROUP, 1, 1, 0, 0.25), (GROUP, 1, 1, 1, 0.25), (GROUP, 1, 1, 2, 0.25)
    ]  # fmt: skip
    assert [len(s.tokens) for s in samples] == [6, 3, 3]
    assert samples[2].spans == (VersionSpan(2, 4, 2),), "spans count from the start of their own sample"


def second(**changes: object) -> list[TurnRow]:
    """A slot whose second row opens its second sample, or does not."""
    return [row(done=False), row(**{"turn": 1, "sample": 1, "spans": (VersionSpan(1, 4, 2),), **changes})]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([], "missing"),
        ([row(done=False)], "missing"),
        ([row(), row(turn=1, start=3)], "missing"),
        ([row(), row(turn=1, sample=1)], "missing"),
        ([row(done=False), row(turn=2, start=3)], "gap"),
        ([row(done=False), row(turn=0, start=3)], "overlap"),
        ([row(done=False), row(turn=1, start=2)], "prefix"),
        ([row(group=5)], "conflict"),
        ([row(sibling=0)], "conflict"),
        ([row(done=False, attempt=2), row(turn=1, start=3, attempt=1)], "conflict"),
        ([row(logprobs=np.zeros(2, np.float32))], "row_digest"),
        ([row(spans=(VersionSpan(1, 3, 1),))], "span"),
        ([row(spans=(VersionSpan(1, 4, 1), VersionSpan(1, 3, 2)))], "span"),
        ([row(spans=(VersionSpan(1, 3, 2), VersionSpan(1, 4, 2)))], "span"),
        ([row(sample=1)], "gap"),
        ([row(sample=-1)], "overlap"),
        ([row(start=1)], "prefix"),
        (second(sample=2), "gap"),
        ([replace(r, done=False) for r in second()] + [row(turn=2, sample=0, start=3)], "overlap"),
        (second(start=3), "prefix"),
        (second(group=5), "conflict"),
        (second(sibling=0), "conflict"),
        (second(attempt=-1), "conflict"),
        (second(mask=np.ones(3, np.int8), spans=(VersionSpan(1, 4, 3),)), "prompt"),
        (second(mask=np.zeros(3, np.int8), spans=()), "empty"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused_with_a_code(rows: list[TurnRow], code: str) -> None:
    with pytest.raises(ReferenceInvalid) as caught:
        assemble_slot(rows, GROUP, 1)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("slots", "code"),
    [
        ([[row(sibling=0)]], "slots"),
        ([[row(sibling=0)], [row()], [row(sibling=2)]], "slots"),
        ([[row(sibling=0)], []], "missing"),
        ([[row()], [row(sibling=0)]], "conflict"),
        ([[row(sibling=0)], [row(sibling=0)]], "conflict"),
    ],
)
def test_a_group_is_exactly_its_sibling_slots_in_order(slots: list[list[TurnRow]], code: str) -> None:
    with pytest.raises(ReferenceInvalid) as caught:
        assemble(slots, GROUP, 2)
    assert caught.value.code == code


# ---------------------------------------------------------------------- any shape


@st.composite
def groups(draw: st.DrawFn) -> list[list[TurnRow]]:
    """The rows of finished groups of any shape: slots of samples of turns, some continued by later attempts."""
    return [draw(slots_of(sibling)) for sibling in range(draw(st.integers(1, 4)))]


@st.composite
def slots_of(draw: st.DrawFn, sibling: int) -> list[TurnRow]:
    rows: list[TurnRow] = []
    attempt = version = 0
    for sample in range(draw(st.integers(1, 4))):
        start = 0
        for first in [True, *[False] * draw(st.integers(0, 2))]:
            given_, made = draw(st.integers(first, 3)), draw(st.integers(1, 3))
            attempt, version = attempt + draw(st.integers(0, 1)), version + draw(st.integers(0, 1))
            tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=given_ + made, max_size=given_ + made)))
            rows.append(TurnRow(
                GROUP, sibling, attempt, len(rows), sample, start, tokens.astype(np.int32),
                -np.arange(len(tokens), dtype=np.float32), np.repeat([0, 1], [given_, made]).astype(np.int8),
                (VersionSpan(attempt, version, made),), False, 0.0, "",
            ))  # fmt: skip
            start += len(tokens)
    return [*rows[:-1], replace(rows[-1], done=True, reward=float(sibling))]


def generated_versions(sample: Sample) -> list[tuple[int, int]]:
    """The version of each generated token."""
    ends = [0, *(span.end for span in sample.spans)]
    return [span[:2] for span, start in zip(sample.spans, ends, strict=False) for _ in range(span.end - start)]


@given(groups())
def test_what_was_written_comes_back_slot_by_slot_and_sample_by_sample(written: list[list[TurnRow]]) -> None:
    block = encode_block("b", [row for rows in written for row in rows])
    read = iter(decode_block(block.data, block.digest, "b"))
    assembled = assemble([[next(read) for _ in rows] for rows in written], GROUP, len(written))
    assert len(assembled) == len(written)
    for sibling, (samples, rows) in enumerate(zip(assembled, written, strict=True)):
        assert [s.index for s in samples] == list(range(rows[-1].sample + 1))
        for sample in samples:
            mine = [r for r in rows if r.sample == sample.index]
            assert (sample.group, sample.sibling, sample.reward) == (GROUP, sibling, float(sibling))
            assert sample.attempt == rows[-1].attempt
            for name in ("tokens", "logprobs", "mask"):
                np.testing.assert_array_equal(getattr(sample, name), np.concatenate([getattr(r, name) for r in mine]))
            spans = [span for r in mine for span in r.spans for _ in range(span.end)]
            assert generated_versions(sample) == [span[:2] for span in spans]


@given(groups(), st.data())
def test_no_altered_row_is_joined(written: list[list[TurnRow]], data: st.DataObject) -> None:
    """Whatever one does to one row of a group, it is refused with a type, or it was no change."""
    rows = written[data.draw(st.integers(0, len(written) - 1), "slot")]
    at = data.draw(st.integers(0, len(rows) - 1), "row")
    old = rows[at]
    last = max(row.sample for row in rows)
    changes: list[dict[str, object]] = [
        {"group": old.group + 1}, {"sibling": old.sibling + 1}, {"turn": old.turn + 1}, {"turn": old.turn - 1},
        {"start": old.start + 1}, {"sample": old.sample + 2}, {"sample": last + 2}, {"sample": -1},
        {"done": not old.done}, {"spans": ()}, {"mask": np.zeros_like(old.mask)}, {"mask": old.mask[1:]},
        *[{"sample": old.sample - 1}] * (old.sample > 0), *[{"attempt": rows[at - 1].attempt - 1}] * (at > 0),
    ]  # fmt: skip
    rows[at] = replace(old, **data.draw(st.sampled_from(changes), "change"))  # type: ignore[arg-type]
    with pytest.raises(ReferenceInvalid):
        assemble(written, GROUP, len(written))


@given(groups(), st.data())
def test_no_row_and_no_slot_can_be_left_out(written: list[list[TurnRow]], data: st.DataObject) -> None:
    num_siblings = len(written)
    slot = data.draw(st.integers(0, num_siblings - 1), "slot")
    if data.draw(st.booleans(), "whole slot"):
        del written[slot]
    else:
        del written[slot][data.draw(st.integers(0, len(written[slot]) - 1), "row")]
    with pytest.raises(ReferenceInvalid):
        assemble(written, GROUP, num_siblings)
