"""What several test files share. Servers start at their first use and end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from flows.seaweed import S3Server, exported, running_seaweed

# No test here is a measurement: how long an example takes says how busy the machine is.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")


CLUSTERS = ("composition", "test_cluster.py", "test_metrics.py", "test_demo.py", "test_fencing.py",
            "test_storage_of_users.py")  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before the hook that selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what starts a Ray cluster: `make test` runs that beside the rest, one cluster after another."""
    for item in items:
        if any(part in CLUSTERS for part in item.path.parts):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as (server, _):
        yield server


@pytest.fixture
def seaweed(seaweed_server: S3Server) -> Iterator[S3Server]:
    """The shared SeaweedFS server, with its keys in the environment."""
    with exported(seaweed_server):
        yield seaweed_server
