"""What runs every night: what takes too long for each change.

    python tests/nightly.py [PART ...] [--fresh] [--list] [--result FILE]

`tox run -e nightly` runs it: learning of every recipe over three seeds, kills, resuming with other
layouts, the faults of the museum, all nine pairs of trainer and generator, every distribution in an
environment of its own, ten minutes of fuzz. It goes on where it stopped (parts.py), and does not
repeat what `tox run -e engines` has run on this code.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests import parts  # noqa: E402
from tests.engines import every_test  # noqa: E402
from tests.parts import CODE, Part, code_of  # noqa: E402

#: The distributions that each recipe's run is made of.
RECIPES = {
    "quickstart": ("algorithms", "sentinel", "torch"),
    "judge": ("algorithms", "placement", "rewards", "sentinel", "torch"),
    "digits": ("algorithms", "diffusion", "rewards"),
    "agent": ("algorithms", "environments", "report", "sentinel", "torch"),
    "calculator": ("algorithms", "environments", "report", "sentinel", "torch"),
    "calculator_async": ("algorithms", "async", "environments", "report", "sentinel", "torch"),
    "noughts": ("algorithms", "environments", "report", "sentinel", "torch"),
    "reasoning": ("algorithms", "environments", "report", "sentinel", "torch"),
    "refine": ("algorithms", "environments", "report", "sentinel", "torch"),
    "smollm2/notes": ("algorithms", "report", "sentinel", "torch"),
    "smollm2/length": ("algorithms", "report", "sentinel", "torch"),
}
SEEDS = (0, 1, 2)
FAULTS = (
    "tests/integration/test_faults.py::"
    "test_random_kills_and_stops_do_not_change_the_result_of_a_run"
)
KILLS_AHEAD = (
    "plugins/gcore-async/tests/test_runs.py::test_thirty_kills_lose_nothing_and_double_nothing"
)
STOPS = "tests/integration/test_resume.py::test_a_run_stopped_repeatedly_gives_the_same_weights"
#: What tests of whole runs need.
INTEGRATION = (*code_of("algorithms", "sentinel", "torch"), "tests/integration")


def learning(recipe: str, names: tuple[str, ...], seed: int) -> Part:
    """Returns the training of a recipe to its end. names: of the distributions of its run."""
    real = "/" in recipe  # in folders are real models, which share code
    own = f"recipes/{recipe.partition('_')[0]}*"  # calculator_async has the calculator's files
    of_calculator = recipe in ("agent", "noughts", "reasoning")
    task = "recipes/calculator" if of_calculator else "recipes/quickstart"
    files = ("recipes/smollm2",) if real else (own, task, "recipes/quickstart")
    return Part(
        name=f"learns-{recipe.replace('/', '-')}-{seed}",
        budget_min=15 if real else 5,
        command=f"{{python}} tests/learning.py {recipe} --seed {seed}",
        runs=(*code_of(*names, recipes=files), "tests/learning.py"),
    )


PARTS = (
    *(learning(recipe, names, seed) for recipe, names in RECIPES.items() for seed in SEEDS),
    Part(
        name="kills-fakes",
        budget_min=10,
        command=f"{{python}} -m pytest -q '{FAULTS}[30 of fakes]'",
        runs=INTEGRATION,
    ),
    Part(
        name="kills-quickstart",
        budget_min=15,
        command=f"{{python}} -m pytest -q '{FAULTS}[30 of the quickstart]'",
        runs=INTEGRATION,
    ),
    Part(
        name="kills-async",
        budget_min=15,
        command=f"{{python}} -m pytest -q {KILLS_AHEAD}",
        runs=(*code_of("algorithms", "async", "sentinel", "torch"), "plugins/gcore-async/tests"),
    ),
    Part(
        name="same-hash",
        budget_min=60,
        command="{python} benchmarks/proved.py --parts hashes --check",
        runs=(
            *code_of("algorithms", "sentinel", "torch"),
            "benchmarks/proved.py",
            "benchmarks/quickstart_runs.py",
        ),
    ),
    Part(
        name="museum",
        budget_min=5,
        command="{python} benchmarks/proved.py --parts museum --check",
        runs=(*code_of("algorithms", "sentinel", "torch"), "tests/museum", "benchmarks/proved.py"),
    ),
    Part(
        name="stops",
        budget_min=10,
        command=f"{{python}} -m pytest -q {STOPS}",
        runs=INTEGRATION,
    ),
    Part(
        name="venvs-kept",
        budget_min=15,
        command="{python} tests/engines/suites.py --create",
        runs=every_test.PINS,
    ),
    Part(
        name="elastic",
        budget_min=10,
        command="{python} -m pytest -q tests/integration/test_elastic.py",
        runs=INTEGRATION,
    ),
    *(part for part in every_test.PARTS if part.name.endswith("-elastic")),
    *every_test.PAIRS,
    Part(
        name="alone",
        budget_min=20,
        command="{python} -m pytest -q -m slow tests/wheels",
        runs=(
            *CODE,
            "pyproject.toml",
            "plugins/*/pyproject.toml",
            "requirements.txt",
            "tests/wheels",
        ),
    ),
    Part(
        name="fuzz",
        budget_min=12,
        command="env FUZZ_SECONDS=600 {python} -m pytest -q tests/fuzz",
        runs=(*CODE, "tests/fuzz"),
    ),
)


if __name__ == "__main__":
    sys.exit(parts.main(PARTS, "What runs every night, part by part."))
