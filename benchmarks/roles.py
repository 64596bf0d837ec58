"""Measures the roles that learn or teach beside the policy: each part by a script of its own.

    python benchmarks/roles.py --parts PART ... [--seeds 0 1 2] [--json] [--check]

A part is a module ``roles_<part>.py`` beside this one. It has the functions ``add_arguments``, for
words of its own, and ``measure``, which returns its claims; its docstring says what it measures.
Parts are trained over the same seeds, and a claim named ``..._min`` is that of the worst seed.
"""

from __future__ import annotations

from parts import run_parts

if __name__ == "__main__":
    raise SystemExit(
        run_parts(
            "roles",
            "Roles that learn or teach beside the policy.",
            packages=("gcore-core", "torch", "transformers", "numpy"),
            seeds=(0, 1, 2),
        )
    )
