"""What several test files share. Servers start at their first use and end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from flows.seaweed import S3Server, exported, running_seaweed

# No test here is a measurement: how long an example takes says how busy the machine is.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as (server, _):
        yield server


@pytest.fixture
def seaweed(seaweed_server: S3Server) -> Iterator[S3Server]:
    """The shared SeaweedFS server, with its keys in the environment."""
    with exported(seaweed_server):
        yield seaweed_server
