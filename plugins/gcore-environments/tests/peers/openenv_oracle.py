"""OpenEnv's own checks of traces: python openenv_oracle.py GOOD.json BAD.json; prints JSON.

GOOD: a list of traces. BAD: traces by the name of the fault that each has.
"""

import json
import sys
from pathlib import Path

from openenv.core.harness.capture.validate import check_turn
from openenv.core.harness.training import TrainingTrace

good, bad = (json.loads(Path(path).read_text()) for path in sys.argv[1:])
turns, findings = 0, []
for trace in good:
    for turn in TrainingTrace(**trace).turns:
        turns += 1
        said = check_turn(turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps)
        findings += [str(one) for one in said.findings]
found = {}
for name, trace in bad.items():
    try:
        TrainingTrace(**trace)
        found[name] = "not found"
    except ValueError as error:
        found[name] = "FATAL" if "[FATAL]" in str(error) else str(error)
print(json.dumps({"turns": turns, "findings": findings, "faults": found}))
