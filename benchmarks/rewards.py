"""Holds the rewards of mathematical answers to the cases of math-verify's own tests.

    python benchmarks/rewards.py [--json] [--check] [--show]

The cases, two texts and whether they are equal, lie in math_verify_cases.json, which names their
source. Each is scored as a record: the first text is the row's answer, the second the completion.

math_agreement: share of the cases in which ``rewards/math`` says what the test expects. Each is
    scored with the decimal places of its test. ``EXCLUDED`` names the cases that are left out, and
    why: what they expect is not right, or right only by an option that the reward does not have.
math_agreement_all: the same with the cases that are left out.
numeric_false_positives: cases in which ``rewards/numeric`` gives 1 and the test expects 0, of those
    that look for plain expressions.
numeric_right_but_not_latex: the same of those that look for LaTeX alone, and so expect 0 for the
    right number in text that is not LaTeX.
numeric_agreement: over the cases whose first text is a plain number, the share in which
    ``rewards/numeric`` says what the test expects. The others it refuses.
number_spellings_wrong: spellings of numbers, in number_spellings.jsonl of gcore-rewards' tests,
    that are read as something else than is right: at the end of a text, as a row's answer, or by
    rewards/numeric.
math_spellings_wrong: of those that are no number, such as ``sqrt(16)``, how many ``rewards/math``
    rewards where the row's answer is a group of their digits, such as 16. Texts with a box are left
    out: what is in it is the answer, whatever stands around it.

``--show`` prints the cases in which a reward and the test differ, and the wrong spellings.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_rewards.answers import last_number
from gcore_rewards.config import MathConfig, VerifierConfig
from gcore_rewards.expressions import MathReward
from gcore_rewards.numbers import Number, number_of
from gcore_rewards.verifiers import Numeric
from gcore_testing.contracts.scorer import scored_record
from report import Claim, add_options, publish, repeated

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.scorer import Scorer

CASES = Path(__file__).with_name("math_verify_cases.json")
SPELLINGS = Path(__file__).parents[1] / "plugins/gcore-rewards/tests/number_spellings.jsonl"
_OPTION = "stands in the suite twice: as 0, and as 1 by an option that the reward does not have"
_FORM = (
    "is 0 to a test that looks for LaTeX alone; the reward also reads the plain text, which is 9"
)
#: (right answer, completion, what the test expects) of the cases that are left out -> why.
EXCLUDED = {
    (r"$x \in [-2,7]$", r"$-2 \\le x \\le 7$", 1): _OPTION,
    ("$f(x)$", "$f(y)$", 1): _OPTION,
    ("$9$", "Answer $ \n 9 \n $", 0): _FORM,
    ("$9$", "Answer \\( \n 9 \n \\)", 0): _FORM,
    # math-verify stops at \mathrm and compares the 1 before it. The reward reads both texts whole.
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$", 1): "they are not equal",
}
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
    def is_excluded(self) -> bool:
        values = self.values
        return (values["gold"], values["answer"], values["expected"]) in EXCLUDED


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
    comparable = [case for case in cases if not case.is_excluded]
    numbers = [case for case in cases if case.numeric is not None]
    wrong = [case for case in numbers if case.is_false_positive]
    plain = [case for case in wrong if "expr" in case.values["forms"]]
    return [
        agreement("math_agreement", comparable, "math", 0.99),
        Claim("math_cases", len(comparable), "cases"),
        Claim("math_excluded", len(cases) - len(comparable), "cases", len(EXCLUDED), "<="),
        agreement("math_agreement_all", cases, "math"),
        Claim("math_cases_all", len(cases), "cases"),
        Claim("math_refused", sum(case.math is None for case in cases), "cases"),
        Claim("math_ms", 1000 * case_s, "ms a comparison"),
        Claim("numeric_false_positives", len(plain), "cases", 0, "<="),
        Claim("numeric_right_but_not_latex", len(wrong) - len(plain), "cases"),
        agreement("numeric_agreement", numbers, "numeric"),
        Claim("numeric_cases", len(numbers), "cases"),
    ]


def spellings() -> list[dict[str, Any]]:
    """Returns the spellings of numbers: kind, text, the right number, whether it stands alone."""
    return [json.loads(line) for line in SPELLINGS.read_text(encoding="utf-8").splitlines()]


def is_misread(spelling: dict[str, Any], numeric: Scorer) -> bool:
    """Returns whether a reader of numbers says something else than is right."""
    text, right = spelling["text"], spelling["right"]
    as_row = {right} if spelling["alone"] else {right, None}
    wanted = right if right is not None else "0"
    rewarded = score(numeric, {"gold": wanted, "answer": text})
    by_text, by_row = said(last_number(text)), said(number_of(text))
    return by_text != right or by_row not in as_row or rewarded != (right is not None)


def said(number: Number | None) -> str | None:
    return None if number is None else f"{number.value}{'%' if number.is_percent else ''}"


def is_rewarded_in_part(spelling: dict[str, Any], math: Scorer) -> bool:
    """Returns whether ``rewards/math`` takes a group of the digits of no number for the answer."""
    parts = sorted(set(re.findall("[0-9]+", spelling["text"])))
    return any(score(math, {"gold": part, "answer": spelling["text"]}) != 0 for part in parts)


def claims_of_spellings(show: bool) -> list[Claim]:
    numeric = Numeric(VerifierConfig(), CONTEXT)
    math = MathReward(MathConfig(), CONTEXT)
    table = spellings()
    wrong = [spelling for spelling in table if is_misread(spelling, numeric)]
    no_numbers = [s for s in table if s["right"] is None and "box" not in s["text"]]
    in_part = [spelling for spelling in no_numbers if is_rewarded_in_part(spelling, math)]
    math.close()
    if show:
        for spelling in (*wrong, *in_part):
            print(json.dumps(spelling, ensure_ascii=False))
    return [
        Claim("number_spellings", len(table), "spellings"),
        Claim("number_spellings_wrong", len(wrong), "spellings", 0, "<="),
        Claim("math_spellings_wrong", len(in_part), "spellings", 0, "<="),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the cases that are not right")
    add_options(parser)
    args = parser.parse_args()
    cases, case_s = measure()
    if args.show:
        for case in cases:
            if case.math != case.expected or case.numeric not in (None, case.expected):
                print(json.dumps({**case.values, "math": case.math, "numeric": case.numeric}))
    measured = [*claims(cases, case_s), *claims_of_spellings(args.show)]
    return publish("rewards", measured, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
