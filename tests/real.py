"""Trains every recipe of a pretrained model to its end, over three seeds.

    python tests/real.py [PART ...] [--fresh] [--list] [--result FILE]

`tox run -e real` runs it; each part prints what was learned as a line of JSON (learning.py). It
goes on where it stopped (parts.py), and does not repeat what `tox run -e nightly` has run on this
code. It is meant for a machine that does nothing else, since it takes hours.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests import nightly, parts  # noqa: E402
from tests.learning import BARS  # noqa: E402

USUAL = ("algorithms", "report", "sentinel", "torch")
#: The distributions that each recipe's run is made of beyond these.
MORE = {
    "smollm2/judged": ("rewards",),
    "smollm2/reasoning": ("rewards",),
}
RECIPES = tuple(recipe for recipe in BARS if recipe.startswith("smollm2/"))
PARTS = tuple(
    nightly.learning(recipe, (*USUAL, *MORE.get(recipe, ())), seed)
    for recipe in RECIPES
    for seed in nightly.SEEDS
)


if __name__ == "__main__":
    sys.exit(parts.main(PARTS, "Train every recipe of a pretrained model."))
