"""Bearer tokens: only the name of an environment variable travels and is shown."""

from __future__ import annotations

import os

from storage.errors import ConfigurationRefused


def token_from(variable: str) -> str:
    """What the variable holds; "" without a variable. Raises `ConfigurationRefused` for an empty one."""
    found = os.environ.get(variable, "") if variable else ""
    if variable and not found:
        raise ConfigurationRefused(
            f"${variable} is empty", expected="a bearer token", action="set it, or name another variable"
        )
    return found
