"""The graph of verifiers of the same turns: python verifiers_graph.py EPISODES.json; prints JSON.

EPISODES: lists of turns, each {"messages": [[role, text], ...], "spans", "prompt", "said", "text"}.
Of each episode: the ids of all branches, in order, and how many ids are sampled in all.
"""

import json
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.types import TurnTokens

MESSAGES = {"user": vf.UserMessage, "assistant": vf.AssistantMessage}
found = []
for turns in json.loads(Path(sys.argv[1]).read_text()):
    trace = vf.Trace(
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        task=vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt="x")),
    )
    for turn in turns:
        prompt = [MESSAGES[role](content=text) for role, text in turn["messages"]]
        tokens = TurnTokens(
            prompt_ids=turn["prompt"],
            completion_ids=turn["said"],
            completion_logprobs=[-0.5] * len(turn["said"]),
            message_spans=[tuple(span) for span in turn["spans"]],
        )
        answer = vf.Response(
            id="",
            created=0,
            model="m",
            message=vf.AssistantMessage(content=turn["text"]),
            finish_reason="stop",
            tokens=tokens,
        )
        graph.prepare_turn(trace, prompt).commit(answer)
    branches = sorted(list(branch.token_ids) for branch in trace.branches)
    found.append([branches, sum(sum(node.mask) for node in trace.nodes)])
print(json.dumps(found))
