"""What the benchmark of checkpoints measures with: a state, the raw client, memory of processes, and lag."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage.buffers import NamedBuffer
from storage.capture import Capture

HIDDEN, INNER, VOCABULARY, LAYERS = 768, 2048, 147_456, 24
"""A language model of 217 bfloat16 tensors and 566 MB: 24 layers of 9, and an embedding of 226 MB."""

State = dict[str, NamedBuffer]


def make_state(scale: float = 1.0) -> State:
    """Random bytes, which no store can compress. `scale` shrinks every tensor."""
    dice = np.random.default_rng(0)
    return {name: _tensor(shape, dice) for name, shape in _shapes(scale).items()}


def _tensor(shape: tuple[int, ...], dice: np.random.Generator) -> NamedBuffer:
    size = int(np.prod(shape)) * 2
    return NamedBuffer("BF16", shape, np.frombuffer(dice.bytes(size), np.uint8).copy())


def _shapes(scale: float) -> dict[str, tuple[int, ...]]:
    hidden, inner = HIDDEN, max(1, int(INNER * scale))
    square, wide = (max(1, int(hidden * scale)), hidden), (inner, hidden)
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": square for name in "qkvo"}
    layer |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (max(1, int(VOCABULARY * scale)), hidden)} | shapes


def change(state: State, capture: Capture, shards: int, seed: int) -> list[str]:
    """Give new bytes to one tensor in each of so many shards; returns the names."""
    dice = np.random.default_rng(seed)
    candidates = [shard for shard in capture.layout.shards if shard.parts[0].key == shard.parts[0].tensor]
    names = [shard.parts[0].tensor for shard in candidates[:: max(1, len(candidates) // shards)][:shards]]
    for name in names:
        state[name].data[:] = np.frombuffer(dice.bytes(state[name].num_bytes), np.uint8)
    return names


# ---------------------------------------------------------------------- the raw client

RAW = """
import sys
from storage.each import each
from storage.host_memory import MappedMemory
from storage.opening import open_store

url, fd, size, *places = sys.argv[1:]
memory = MappedMemory(int(fd), int(size))
shards = [memory.view[int(a) : int(b)] for a, b in (place.split(":") for place in places)]
store = open_store(url)
print("ready", flush=True)
for line in sys.stdin:
    each(lambda i: store.create(f"{line.strip()}/{i}", shards[i]), range(len(shards)))
    print("done", flush=True)
"""


class RawClient:
    """A process that puts the capture's shards with the same client and as many at once, and does nothing else."""

    def __init__(self, url: str, capture: Capture) -> None:
        fd = capture.memory.fd
        places = [f"{shard.offset}:{shard.offset + shard.size}" for shard in capture.layout.shards]
        self._process = subprocess.Popen(
            [sys.executable, "-c", RAW, url, str(fd), str(capture.layout.size), *places],
            pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def put(self, prefix: str) -> float:
        """Seconds until every shard is stored below `prefix`."""
        assert self._process.stdin is not None
        started = time.perf_counter()
        print(prefix, file=self._process.stdin, flush=True)
        self._answer()
        return time.perf_counter() - started

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the raw client ended with {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ---------------------------------------------------------------------- memory


def memory_mb(pid: int | str, *kinds: str) -> float:
    """What a process holds of `Anon` and `Shmem` memory; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return (
        sum(int(line.split()[1]) for line in lines if line.startswith(tuple(f"Rss{kind}" for kind in kinds)))
        * 1024
        / 1e6
    )


class Peak:
    """The largest memory of this process and of the publishing process together, looked at all the time by a thread.
    What both map belongs to this process, and counts once."""

    def __init__(self, publisher: int) -> None:
        self.mb = 0.0
        self._publisher, self._over = publisher, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.mb = max(self.mb, memory_mb("self", "Anon", "Shmem") + memory_mb(self._publisher, "Anon"))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# ---------------------------------------------------------------------- lag


@contextmanager
def training() -> Generator[list[float]]:
    """A thread that multiplies matrices as a training step does; yields the seconds of its steps so far."""
    steps: list[float] = []
    over = threading.Event()
    matrix: npt.NDArray[np.float32] = np.random.default_rng(0).random((192, 192), np.float32)

    def train() -> None:
        while not over.is_set():
            started = time.perf_counter()
            matrix @ matrix  # pyright: ignore[reportUnusedExpression]
            steps.append(time.perf_counter() - started)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield steps
    finally:
        over.set()
        thread.join()


async def lags(work: asyncio.Future[object], every_s: float = 0.001) -> list[float]:
    """How much later than asked for this loop woke up, until `work` is done."""
    found: list[float] = []
    while not work.done():
        started = time.perf_counter()
        await asyncio.sleep(every_s)
        found.append(time.perf_counter() - started - every_s)
    await work
    return found
