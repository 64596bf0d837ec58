"""The exhibits, one module for kinds that go together."""

from __future__ import annotations

from itertools import chain

from gcore_testing.museum import Exhibit

from tests.museum.exhibits import forward, lineage, runs, updates, weights

#: All exhibits, in the order of their kinds.
ALL: tuple[Exhibit, ...] = tuple(
    sorted(
        chain.from_iterable(part.EXHIBITS for part in (weights, forward, lineage, updates, runs)),
        key=lambda exhibit: (exhibit.kind, exhibit.control),
    )
)
