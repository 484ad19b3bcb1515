"""What a system notices of one flipped bit in its files: each trial flips one, reads everything in a process of its
own, and flips it back."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

DEADLINE_S = 60.0
FIRST_S = 600.0
"""The first read waits for the fork server's imports."""


def fingerprint(value: Any) -> str:
    """sha256 over everything in `value`, so that two reads can be compared across processes."""
    digest = hashlib.sha256()
    _add(value, digest.update)
    return digest.hexdigest()


def _add(value: Any, add: Callable[[bytes], object]) -> None:
    add(type(value).__name__.encode())
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        add(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, msgspec.Struct):
        add(msgspec.json.encode(value))
    elif isinstance(value, dict):
        _add_all(sorted(value.items(), key=lambda item: repr(item[0])), add)
    elif isinstance(value, set | frozenset):
        _add_all(sorted(value, key=repr), add)
    elif isinstance(value, list | tuple):
        _add_all(value, add)
    elif isinstance(value, str | bytes | int | float | bool | Enum | None):
        add(repr(value).encode())
    else:
        _add_all(_attributes(value), add)


def _add_all(values: Iterable[Any], add: Callable[[bytes], object]) -> None:
    for value in values:
        _add(value, add)
        add(b";")


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = getattr(type(value), "__slots__", None) or sorted(getattr(value, "__dict__", {}))
    return [(name, getattr(value, name)) for name in names] or [("repr", repr(value))]


def _trial(make: Callable[[Path], Any], folder: Path, answer: Any) -> None:
    try:
        system = make(folder)
        answer.send(("read", fingerprint(system.content(system.read()))))
    except BaseException as error:  # noqa: BLE001 - whatever is raised was noticed; also a panic of a Rust library
        answer.send(("error", type(error).__name__))


def _read(context: Any, make: Callable[[Path], Any], folder: Path, deadline_s: float = DEADLINE_S) -> tuple[str, str]:
    """("read", fingerprint), ("error", class), ("aborted", exit code) or ("hung", "")."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_trial, args=(make, folder, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(deadline_s):
            process.kill()
            return "hung", ""
        return ours.recv()
    except EOFError:
        process.join()
        return "aborted", str(process.exitcode)
    finally:
        process.join()


def flip_bits(
    make: Callable[[Path], Any], folder: Path, trials: int, seed: int, preload: list[str], files: list[Path]
) -> dict[str, Any]:
    """Counts of outcomes over `trials` positions, uniform over all bits of `files`. `silent` is a read without an
    error that found something else. A process that aborted has noticed, if rudely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    kind, before = _read(context, make, folder, FIRST_S)
    if kind != "read" or _read(context, make, folder) != (kind, before):
        raise RuntimeError(f"reading {folder} undamaged gives {kind} {before}")
    dice = random.Random(seed)
    sizes = [path.stat().st_size for path in files]
    outcomes: Counter[str] = Counter()
    for _ in range(trials):
        (path,) = dice.choices(files, sizes)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        _overwrite(path, bad)
        kind, found = _read(context, make, folder)
        _overwrite(path, good)
        outcomes[kind if kind != "read" else "equal" if found == before else "silent"] += 1
    return {
        "trials": trials,
        **{kind: outcomes[kind] for kind in ("error", "aborted", "hung", "equal", "silent")},
        "noticed_or_equal": (trials - outcomes["silent"]) / trials,
        "bytes": sum(sizes),
    }


def _overwrite(path: Path, data: bytes | bytearray) -> None:
    with open(path, "r+b") as file:
        file.write(data)
