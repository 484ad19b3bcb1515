"""What the server that forks processes of a run imports once: a run in memory, so that each fork begins with everything
loaded that a run loads at its first use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import s3fs  # noqa: F401

from storage.memory import MemoryStore
from storage.s3_connection import _service_model
from tests.faults.dying import house_of

asyncio.run(house_of(Path("none"), MemoryStore("warm")).run(retries=1))
_service_model().load_service_model("s3", "service-2")
