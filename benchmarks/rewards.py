"""Holds the rewards of mathematical answers to the cases of math-verify's own tests.

    python benchmarks/rewards.py [--json] [--check] [--show]

The cases, two texts and whether they are equal, lie in math_verify_cases.json, which names their
source. Each is scored as a record: the first text is the row's answer, the second the completion.

math_agreement: share of the cases in which ``rewards/math`` says what the test expects. Each is
    scored with the decimal places of its test. The cases of tests that look for LaTeX alone, or for
    plain expressions alone, count, though the reward always looks for both. Left out are those that
    need an option of the library which the reward does not have: variables that are matched by
    place, relations that equal a set.
math_agreement_all: the same with the cases that are left out.
numeric_false_positives: cases in which ``rewards/numeric`` gives 1 and the test expects 0, of those
    that look for plain expressions.
numeric_right_but_not_latex: the same of those that look for LaTeX alone, and so expect 0 for the
    right number in text that is not LaTeX.
numeric_agreement: over the cases whose first text is a plain number, the share in which
    ``rewards/numeric`` says what the test expects. The others it refuses.

``--show`` prints the cases in which a reward and the test differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_rewards.config import MathConfig, VerifierConfig
from gcore_rewards.expressions import MathReward
from gcore_rewards.verifiers import Numeric
from report import Claim, add_options, publish, repeated

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.scorer import Scorer
from gcore_core.testing.contracts.scorer import scored_record

CASES = Path(__file__).with_name("math_verify_cases.json")
CONTEXT = WorkerContext(role="scorer")
DISTRIBUTIONS = ["gcore-core", "gcore-rewards", "math-verify", "latex2sympy2-extended", "sympy"]


@dataclass(frozen=True)
class Case:
    """One case of the tests, and what the rewards say of it; None where they refuse the row."""

    values: dict[str, Any]
    math: float | None
    numeric: float | None

    @property
    def expected(self) -> float:
        return float(self.values["expected"])

    @property
    def is_false_positive(self) -> bool:
        return self.numeric == 1 and self.expected == 0

    @property
    def needs_another_option(self) -> bool:
        return "strict" in self.values or "relations_as_sets" in self.values


def measure() -> tuple[list[Case], float]:
    """The scored cases, and the seconds that ``rewards/math`` took for one of them."""
    cases = json.loads(CASES.read_text())["cases"]
    digits = {values.get("digits", MathConfig().digits) for values in cases}
    math = {number: MathReward(MathConfig(digits=number), CONTEXT) for number in digits}
    numeric = Numeric(VerifierConfig(), CONTEXT)
    began_s = time.perf_counter()
    by_math = [score(math[values.get("digits", MathConfig().digits)], values) for values in cases]
    case_s = (time.perf_counter() - began_s) / len(cases)
    for reward in math.values():
        reward.close()
    by_numeric = [score(numeric, values) for values in cases]
    return [Case(*scored) for scored in zip(cases, by_math, by_numeric, strict=True)], case_s


def score(reward: Scorer, values: dict[str, Any]) -> float | None:
    """What a reward says of a case; None where it refuses the row's answer."""
    try:
        return reward.score([scored_record(0, values["answer"], {"answer": values["gold"]})])[
            0
        ].value
    except DataError:
        return None


def agreement(name: str, cases: Sequence[Case], reward: str, bar: float | None = None) -> Claim:
    """Returns in how many of the cases a reward says what is expected; interval over the cases."""
    agreed = [getattr(case, reward) == case.expected for case in cases]
    return repeated(name, agreed, statistics.fmean, "share of the cases", bar)


def claims(cases: Sequence[Case], case_s: float) -> list[Claim]:
    comparable = [case for case in cases if not case.needs_another_option]
    numbers = [case for case in cases if case.numeric is not None]
    wrong = [case for case in numbers if case.is_false_positive]
    plain = [case for case in wrong if "expr" in case.values["forms"]]
    return [
        agreement("math_agreement", comparable, "math", 0.99),
        Claim("math_cases", len(comparable), "cases"),
        agreement("math_agreement_all", cases, "math"),
        Claim("math_cases_all", len(cases), "cases"),
        Claim("math_refused", sum(case.math is None for case in cases), "cases"),
        Claim("math_ms", 1000 * case_s, "ms a comparison"),
        Claim("numeric_false_positives", len(plain), "cases", 0, "<="),
        Claim("numeric_right_but_not_latex", len(wrong) - len(plain), "cases"),
        agreement("numeric_agreement", numbers, "numeric"),
        Claim("numeric_cases", len(numbers), "cases"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the cases that differ")
    add_options(parser)
    args = parser.parse_args()
    cases, case_s = measure()
    if args.show:
        for case in cases:
            if case.math != case.expected or case.numeric not in (None, case.expected):
                print(json.dumps({**case.values, "math": case.math, "numeric": case.numeric}))
    return publish("rewards", claims(cases, case_s), args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
