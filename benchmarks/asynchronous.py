"""Measures the asynchronous program against the synchronous one: each part by a script of its own.

    python benchmarks/asynchronous.py --parts PART ... [--seeds 0 1 2 3 4] [--json] [--check]

A part is a module ``asynchronous_<part>.py`` beside this one, as for ``roles.py``. Runs of both
programs are interleaved, so that both meet the same load. Ratios of times say little on a machine
that others use: the result has the load.
"""

from __future__ import annotations

from parts import run_parts

if __name__ == "__main__":
    raise SystemExit(
        run_parts(
            "asynchronous",
            "The asynchronous program beside core/sync.",
            packages=("gcore-core", "gcore-async", "gcore-sim", "torch", "transformers"),
            seeds=(0, 1, 2, 3, 4),
        )
    )
