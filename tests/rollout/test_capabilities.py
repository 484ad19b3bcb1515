"""Owned mode is asked of the source and of the capacities, never guessed."""

from __future__ import annotations

import pytest

from gpu.rollout.capabilities import Capabilities, check_trainable, is_owned
from gpu.rollout.messages import PlainTask
from gpu.rollout.plain import PlainSource
from gpu.rollout.source import PromptStream
from storage.errors import ConfigurationRefused

ABLE = Capabilities(finite=False, reservable=True, resumable=True)
PLAIN = Capabilities(finite=True, reservable=False, resumable=False)


def test_a_prompt_stream_can_reserve_and_resume_and_says_whether_it_ends() -> None:
    assert PromptStream(3, seed=0, shuffle=True, epochs=None).capabilities == ABLE
    assert PromptStream(3, seed=0, shuffle=True, epochs=2).capabilities == ABLE._replace(finite=True)
    assert PlainSource(iter([PlainTask("s", 0)]), 1, 1, finite=True).capabilities == PLAIN


def test_owned_mode_is_a_reservable_source_with_all_capacities() -> None:
    assert is_owned(ABLE, 8, 8, 6)
    assert not is_owned(ABLE, None, None, None)
    assert not is_owned(PLAIN, None, None, None)


@pytest.mark.parametrize("given", [(8, None, 6), (None, 8, 6), (8, 8, None), (None, None, 6)])
def test_some_capacities_are_refused_with_the_names_of_those_that_lack(given: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigurationRefused, match="= null while") as caught:
        is_owned(ABLE, *given)
    assert (caught.value.code, caught.value.exit_code) == ("capability", 2)


@pytest.mark.parametrize("given", [(8, 8, 6), (8, None, None)])
def test_any_capacity_on_a_source_that_cannot_reserve_is_refused(given: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigurationRefused, match="cannot reserve"):
        is_owned(PLAIN, *given)


def test_training_needs_receipts() -> None:
    assert check_trainable(ABLE, 8, 7, 6) == (8, 7, 6)
    for source, given, why in (
        (PLAIN, (None, None, None), "cannot reserve"),
        (ABLE, (None, None, None), "are null"),
        (ABLE._replace(resumable=False), (8, 8, 6), "cannot resume"),
    ):
        with pytest.raises(ConfigurationRefused, match=why) as caught:
            check_trainable(source, *given)
        assert caught.value.code == "needs_receipts"
