"""The manager that several files try."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rollout.desk import Desk


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with Desk().opened() as one:
        yield one
