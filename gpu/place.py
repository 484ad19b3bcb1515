"""Where a driver runs, as host:pid, and whether it may still be there."""

from __future__ import annotations

import os
import socket


def this_place() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def may_live(place: str) -> bool:
    """Whether a process other than this one may still run at `place`; what another host does cannot be seen."""
    host, _, pid = place.rpartition(":")
    if place == this_place() or not pid.isdigit():
        return False
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and somebody else's
        return True
    return True
