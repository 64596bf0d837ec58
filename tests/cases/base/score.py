"""Scores the texts of cases.jsonl by a reward: python score.py numeric|math|exact-match|code."""

import json
import sys
from pathlib import Path

from gcore_rewards.code import CodeReward
from gcore_rewards.config import CodeConfig, MathConfig, VerifierConfig
from gcore_rewards.expressions import MathReward
from gcore_rewards.verifiers import ExactMatch, Numeric

from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

REWARDS = {
    "numeric": lambda: Numeric(VerifierConfig(), None),
    "exact-match": lambda: ExactMatch(VerifierConfig(), None),
    "math": lambda: MathReward(MathConfig(), None),
    "code": lambda: CodeReward(CodeConfig(time_s=3.0), None),
}


def main() -> None:
    reward = REWARDS[sys.argv[1]]()
    lines = Path(__file__).with_name("cases.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        case = json.loads(line)
        record = ScoredRecord(
            ordinal=number,
            sample=0,
            prompt=Prompt(row=number, text="", fields=case),
            text=case["text"],
            status="finished",
            columns={},
        )
        score = reward.score([record])[0]
        if "right" in case:
            print("ok " if score.value == case["right"] else "BAD", end="")
        print(case, score)
    if hasattr(reward, "close"):
        reward.close()


if __name__ == "__main__":
    main()
