"""Optional packages that environments come from: imported when one is made, never before."""

from __future__ import annotations

import importlib
from types import ModuleType

from storage.errors import ConfigurationRefused


def need(module: str, extra: str) -> ModuleType:
    """The module of an optional package. Raises `ConfigurationRefused` that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationRefused(
            f"no package {module.partition('.')[0]!r}: {error}",
            expected="it on the driver and on every worker",
            action=f"pip install 'tidegate[{extra}]'",
        ) from error


def named(path: str) -> object:
    """What an import path `package.module:name` names. Raises `ConfigurationRefused`."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationRefused(
            f"{path!r}: {error}",
            expected="an importable module:function on every worker",
            action="install the package on every node, or correct the path",
        ) from error
