"""From an environment's name to the environment: built in, installed (entry point `tidegate.environments`), or an
import path `package.module:Class`. Code comes from installed packages, never from storage."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points

from gpu.environments.base import Environment
from gpu.models import tokenizer
from gpu.rollout.topology import Topology
from storage.errors import ConfigurationRefused

BUILT_IN = {
    "reverse": "gpu.environments.reverse:ReverseLetters",
    "addition": "gpu.environments.addition:Addition",
    "guess": "gpu.environments.guess:GuessLetter",
    "cave": "gpu.environments.cave:Cave",
    "calculate": "gpu.environments.calculate:Calculate",
    "workspace": "gpu.environments.workspace:Workspace",
    "ticket": "gpu.environments.ticket:Ticket",
    "reasoning_gym": "gpu.environments.reasoning_gym:ReasoningGym",
    "gymnasium": "gpu.environments.gymnasium_text:Gymnasium",
    "verifiers": "gpu.environments.verifiers_env:Verifiers",
    "nemo_gym": "gpu.environments.nemo_gym:NemoGym",
}
GROUP = "tidegate.environments"


def make_environment(name: str, options: Mapping[str, object]) -> Environment:
    """Raises `ConfigurationRefused` for names and options that do not exist."""
    try:
        made = _load(name)(**options)
    except ConfigurationRefused:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationRefused(
            f"environment {name!r} with options {dict(options)}: {error}",
            expected="options it accepts",
            action="check environment.options",
        ) from error
    if not isinstance(made, Environment):
        raise ConfigurationRefused(
            f"{name!r} makes a {type(made).__name__}",
            expected="a gpu.environments.base.Environment",
            action="check environment.name",
        )
    return made


def recipe_fingerprint(environment: Environment) -> str:
    """Digest of the code that decides what a result means: the environment with its reward, and the chat template.
    Names and options are not in it: with others a resume is refused."""
    modules = [inspect.getmodule(type(environment)), tokenizer, *map(inspect.getmodule, environment.recipe)]
    try:
        sources = [inspect.getsource(module) for module in modules if module is not None]
    except OSError:  # a class without a file, from a notebook or an exec: nothing to compare
        sources = [type(environment).__qualname__]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def topology_of(environment: Environment) -> Topology:
    """The environment's resources, as rollout control knows them."""
    hosts = environment.resources
    modes = {name: host.checkpoint_mode.value for name, host in hosts.items()}
    episode = environment.episode().checkpoint_mode.value
    return Topology(episode, modes, {name: host.schema for name, host in hosts.items()})


def _load(name: str) -> type[Environment]:
    path = BUILT_IN.get(name)
    if path is None and ":" in name:
        path = name
    if path is None:
        found = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name in found:
            return found[name].load()
        raise ConfigurationRefused(
            f"no environment {name!r}",
            expected=", ".join([*BUILT_IN, *found, "or package.module:Class"]),
            action="check environment.name",
        )
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationRefused(
            f"environment {name!r}: {error}",
            expected="an importable module:Class on every worker",
            action="install the package on every node, or correct the path",
        ) from error
