"""mini-swe-agent, unchanged, in a folder: python mini_swe_agent.py URL KEY FOLDER; prints JSON."""

import json
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

url, key, folder = sys.argv[1:]
about = {"api_base": url, "api_key": key, "drop_params": True}
model = LitellmModel(model_name="openai/policy", model_kwargs=about, cost_tracking="ignore_errors")
agent = DefaultAgent(
    model,
    LocalEnvironment(cwd=folder),
    system_template="You edit files.",
    instance_template="Task: {{ task }}",
    step_limit=5,
)
ended = agent.run("Write four into the file.")
print(json.dumps({"ended": ended, "calls": agent.n_calls}))
