"""Measures training of models that are large for their devices: each part by a script of its own.

    python benchmarks/large.py --parts PART ... [--json] [--check]

A part is a module ``large_<part>.py`` beside this one. It has the functions ``add_arguments``, for
words of its own, and ``measure``, which returns its claims; its docstring says what it measures.
"""

from __future__ import annotations

from parts import run_parts

if __name__ == "__main__":
    raise SystemExit(
        run_parts(
            "large",
            "Models that are large for their devices.",
            packages=("gcore-core", "torch", "transformers", "numpy"),
        )
    )
