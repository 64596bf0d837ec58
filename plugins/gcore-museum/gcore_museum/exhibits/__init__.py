"""The exhibits, one module for kinds that go together."""

from __future__ import annotations

from gcore_core.testing.museum import Exhibit
from gcore_museum.exhibits import forward, lineage, updates, weights

#: All exhibits, in the order of their kinds.
ALL: tuple[Exhibit, ...] = tuple(
    sorted(
        (*weights.EXHIBITS, *forward.EXHIBITS, *lineage.EXHIBITS, *updates.EXHIBITS),
        key=lambda exhibit: (exhibit.kind, exhibit.control),
    )
)
