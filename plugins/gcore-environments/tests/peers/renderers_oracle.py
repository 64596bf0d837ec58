"""The renderer of Qwen3 of ``renderers``: python renderers_oracle.py TOKENIZER CASES.json.

CASES: a list of {"messages", "said": ids of a turn, "new": messages}. Prints JSON: of each case the
prompt's ids, and those behind the turn; null where it knows no bridge.
"""

import json
import sys
from pathlib import Path

from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
found = []
for case in json.loads(Path(sys.argv[2]).read_text()):
    start = renderer.render_ids(case["messages"], add_generation_prompt=True)
    bridge = renderer.bridge_to_next_turn(start, case["said"], case["new"])
    before = len(start) + len(case["said"])
    behind = None if bridge is None else list(bridge.token_ids)[before:]
    found.append({"start": list(start), "behind": behind})
print(json.dumps(found))
