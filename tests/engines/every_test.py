"""Every test of every engine, the slow ones too, and all nine pairs.

    python tests/engines/every_test.py [PART ...] [--fresh] [--list] [--result FILE]

`tox run -e engines` runs it, in venvs that it makes anew. Each file of an engine plugin's tests is
a part of its own, so a run that was cut off goes on where it stopped (tests/parts.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests import parts  # noqa: E402
from tests.engines.suites import (  # noqa: E402
    BESIDE,
    BESIDE_OF,
    ENGINES,
    distribution_of,
    tests_of,
)
from tests.parts import KIT, Part, code_of  # noqa: E402

#: Minutes of a file where they are more than those of most.
BUDGETS = {"elastic": 60, "split": 20, "cluster": 20, "images": 15, "contract": 15}
USUAL_MIN = 10
#: Files that run contracts of the kit.
CONTRACTS = ("contract", "cluster")
SUITES = "tests/engines/suites.py"
#: What decides what is installed.
PINS = (
    SUITES,
    "constraints.txt",
    "plugins/*/gcore_*/**/*.txt",
    "plugins/gcore-tools/gcore_tools/venv",
)


def test_files(engine: str) -> list[str]:
    """Returns the files of the plugin that have tests with its real engine, from the root."""
    files = sorted((ROOT / tests_of(engine)).glob("test_*.py"))
    return [
        str(file.relative_to(ROOT)) for file in files if "pytest.mark.engine" in file.read_text()
    ]


def suites() -> Iterator[Part]:
    """Yields a part for each file of each engine's tests."""
    for engine in ENGINES:
        needed = (distribution_of(engine), *BESIDE, *BESIDE_OF.get(engine, ()))
        code = code_of(*(name.removeprefix("gcore-") for name in needed))
        for file in test_files(engine):
            topic = Path(file).stem.removeprefix("test_")
            yield Part(
                name=f"{engine}-{topic}",
                budget_min=BUDGETS.get(topic, USUAL_MIN),
                command=f"{{python}} {SUITES} --engines {engine} --slow --files {file}",
                runs=(
                    *code,
                    *((KIT,) if topic in CONTRACTS else ()),
                    SUITES,
                    tests_of(engine),
                ),
            )


PAIRS = tuple(
    Part(
        name=f"pair-{pair.replace(':', '-')}",
        budget_min=3,
        command=f"{{python}} benchmarks/engine_pairs.py --check --pairs {pair}",
        runs=(
            *code_of("algorithms", *(side.partition("-")[0] for side in pair.split(":"))),
            "benchmarks/engine_pairs.py",
            SUITES,
        ),
    )
    for pair in (
        "torch:torch",
        "torch:deepspeed-zero3",
        "vllm:torch",
        "vllm:deepspeed-zero3",
        "sglang:torch",
        "sglang:deepspeed-zero3",
        "torch:megatron-dp2",
        "vllm:megatron-tp2",
        "sglang:megatron-pp2",
    )
)
PARTS = (
    Part(
        name="venvs",
        budget_min=15,
        command=f"{{python}} {SUITES} --create --fresh",
        runs=PINS,
    ),
    *suites(),
    *PAIRS,
)


if __name__ == "__main__":
    sys.exit(parts.main(PARTS, "Every test of every engine, part by part."))
