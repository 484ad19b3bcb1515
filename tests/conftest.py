"""Servers that several test files share; each starts at its first use and ends with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows.seaweed import S3Server, exported, running_seaweed


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as (server, _):
        yield server


@pytest.fixture
def seaweed(seaweed_server: S3Server) -> Iterator[S3Server]:
    """The shared SeaweedFS server, with its keys in the environment."""
    with exported(seaweed_server):
        yield seaweed_server
