"""The captures of one trainer and their publication: one in flight, in memory that the next capture uses again.

A capture is kept until the next one is taken, so that a failed publication is repeated with exactly its bytes and a
finished one answers again. While it is being published no other is taken; a step that trains on does not touch it.
"""

from __future__ import annotations

import threading

from gpu.training.trainer import Trainer
from storage.capture import Capture, CaptureBuffers
from storage.checkpoint import Written
from storage.errors import LeaseRefused
from storage.publisher import Newest, Progress, Publisher
from storage.schema import CheckpointPublished


class Checkpoints:
    """All calls block; `publish` runs beside the others."""

    def __init__(self, run: str, publisher: Publisher) -> None:
        self._run, self._publisher = run, publisher
        self._buffers = CaptureBuffers()
        self._flight = threading.Lock()
        """Held by whoever reads or changes the buffers."""
        self._capture: Capture | None = None
        self._written: tuple[int, Written] | None = None
        self._whole = False

    @property
    def progress(self) -> Progress:
        """Of the publication under way or the last one."""
        return self._publisher.progress

    def restart(self, trainer: Trainer, *, whole: bool = False) -> None:
        """The trainer was restored: forget the capture, and touch the memory of the next one before a hold waits for
        it. `whole`: a newer checkpoint was found damaged, so the next publication refers to nothing unread."""
        self._whole |= whole
        self._capture = None  # a publication under way goes on with its own
        if self._flight.acquire(blocking=False):
            try:
                trainer.prepare(self._buffers)
            finally:
                self._flight.release()

    def capture(self, trainer: Trainer, step: int) -> int:
        """Copy the state after `step` unless it is captured already; returns its size in bytes. Returns 0, and does
        nothing, while the capture of another step is being published. Raises `LeaseRefused`."""
        captured = self._capture
        if captured is not None and captured.step == step:
            return captured.layout.num_bytes
        if trainer.step != step or not trainer.clean:
            raise LeaseRefused(
                f"checkpoint of step {step} while the trainer is at step {trainer.step}",
                expected="the trainer to be exactly at that step",
                action="capture before the next step",
                code="state",
            )
        if not self._flight.acquire(blocking=False):
            return 0
        try:
            self._capture = self._written = None
            self._capture = trainer.capture(self._buffers)
            return self._capture.layout.num_bytes
        finally:
            self._flight.release()

    def publish(self, step: int, incarnation: int, newest: CheckpointPublished | None) -> Written:
        """Write the captured state; a call that comes while another one writes waits for it. Raises `LeaseRefused` when
        there is no capture of `step`, and what `Publisher.publish` raises."""
        with self._flight:
            capture = self._capture
            if capture is None or capture.step != step:
                raise LeaseRefused(
                    f"no capture of step {step}",
                    expected="a capture before the upload",
                    action="take the next checkpoint",
                    code="capture",
                )
            if self._written is None or self._written[0] != incarnation:
                base = Newest(newest.manifest, newest.digest) if newest and not self._whole else None
                self._written = incarnation, self._publisher.publish(self._run, incarnation, capture, base)
                self._whole = False
            return self._written[1]
