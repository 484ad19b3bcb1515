"""A configuration from JSON and changes on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from flows.config import RunConfig
from storage.errors import ConfigurationRefused


def load_config(text: str, changes: Sequence[str]) -> RunConfig:
    """A configuration from JSON with changes `a.b=json`. Raises `ConfigurationRefused`."""
    try:
        values = json.loads(text)
        for change in changes:
            path, _, value = change.partition("=")
            *parents, last = path.split(".")
            place = values
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = _json_or_text(value)
        return RunConfig.model_validate(values)
    except (json.JSONDecodeError, ValidationError, AttributeError, TypeError) as error:
        raise ConfigurationRefused(
            f"the configuration is not one: {error}",
            expected="a RunConfig as JSON",
            action="compare with docs/settings.md, or leave fields out to take their defaults",
        ) from error


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def settings_of(settings: Mapping[str, object], run: str, url: str, changes: Sequence[str]) -> RunConfig:
    """The configuration of a run from the settings another or an earlier one was started with. Raises
    `ConfigurationRefused`."""
    values: dict[str, Any] = {**settings, "run": run}
    values["storage"] = {**values.get("storage", {}), "url": url}
    return load_config(json.dumps(values), changes)
