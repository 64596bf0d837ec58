"""An episode of many turns has the log-probs of one pass over all that was read and said.

The engine is torch's. It reads the tokens of each turn behind those that it has read before, in
batches with other episodes; a trainer reads each record once, from its beginning.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gcore_environments.draws import EpisodeDraws
from gcore_environments.settings import EnvironmentConfig

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt

pytest.importorskip("gcore_torch")
torch = pytest.importorskip("torch")
TURNS = 30
EPISODES = 6
#: In nats. Float32 leaves some 1e-6 on a model whose weights are small.
TOLERANCE = 1e-4
ASKING = """
from gcore_environments import Observation

class Asking:
    def __init__(self, turns):
        self.left = turns

    async def reset(self, row, seed):
        return Observation(messages=[{"role": "user", "content": row["prompt"]}])

    async def step(self, reply):
        self.left -= 1
        if not self.left:
            return Observation(done=True)
        return Observation(messages=[{"role": "user", "content": f"+{self.left}="}])
"""


def play(directory: Path, family: str, *, deterministic: bool) -> list[Finished]:
    """Returns the records of a few episodes, drawn together."""
    from gcore_language.tiny import save_model
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator

    from tests.support.language_models import make_context

    save_model(directory, family)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
    (directory / "chat_template.jinja").unlink()  # it forks where a random model says "<pad>"
    (directory / "asking.py").write_text(ASKING)
    context = replace(make_context(directory, deterministic=deterministic), acts=True)
    settings = EnvironmentConfig(
        environment=f"{directory}/asking.py:Asking",
        config={"turns": TURNS},
        turns=TURNS,
        turn_tokens=3,
        turn_s=120.0,
    )
    draws = EpisodeDraws(
        settings,
        replace(context, role="rollout"),
        TorchGenerator(TorchGeneratorConfig(max_new_tokens=400), context),
    )
    draws.submit(
        [
            SampleRequest(
                ordinal=number,
                sample=0,
                seed=number,
                prompt=Prompt(row=0, text="1+2=" * (number + 1)),
            )
            for number in range(EPISODES)
        ]
    )
    records: list[Finished] = []
    while len(records) < EPISODES:
        records += draws.step()
    draws.close()
    return records


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probs_of_thirty_turns_are_those_of_one_pass(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    records = play(tmp_path, family, deterministic=deterministic)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for record in records:
        columns = record.columns
        assert json.loads(columns["episode"].tobytes())["turns"] == TURNS
        assert len(columns["sequences"]) == 1, "it has forked, so no turn is behind the one before"
        ids = np.concatenate([columns["prompt_ids"], columns["action_ids"]]).astype(np.int64)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1]
        whole = torch.log_softmax(logits, -1).numpy()[np.arange(len(ids) - 1), ids[1:]]
        sampled = columns["action_mask"] != 0
        gap = np.abs(whole[-sampled.size :] - columns["logp"])[sampled]
        assert gap.size >= TURNS and gap.max() < TOLERANCE
