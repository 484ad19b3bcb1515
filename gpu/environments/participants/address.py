"""Where a host is and what it wants to see: urls without keys, and bearer tokens of which only the name travels."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from storage.errors import ConfigurationRefused


def checked_url(url: str, what: str) -> str:
    """Without its last slash. Raises `ConfigurationRefused`, and does not show what may be a key."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ConfigurationRefused(
            f"{what} at {parts.scheme or 'no scheme'}://{parts.hostname or ''}",
            expected="http:// or https:// with an address, without keys",
            action="correct its url; a token comes from an environment variable",
        )
    return url.rstrip("/")


def token_from(variable: str) -> str:
    """What the variable holds; "" without a variable. Raises `ConfigurationRefused` for an empty one."""
    found = os.environ.get(variable, "") if variable else ""
    if variable and not found:
        raise ConfigurationRefused(
            f"${variable} is empty", expected="a bearer token", action="set it, or name another variable"
        )
    return found
