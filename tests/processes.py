"""Processes of this machine, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for `condition()`; a test that waits in vain fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        os.kill(pid, 0)
        return stat_of(pid)[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def stat_of(pid: int) -> list[str]:
    """State, parent and so on: what follows the name in /proc/<pid>/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
