"""The base of all records of the journal."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of all records. Ordinals, steps, attempts and versions count from 0; tuples in one record run parallel."""
