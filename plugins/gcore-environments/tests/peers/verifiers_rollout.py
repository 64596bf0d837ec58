"""One rollout of verifiers with its train client.

python verifiers_rollout.py URL TOKENIZER; the key is in the variable EPISODE_KEY; prints JSON.
"""

import asyncio
import json
import sys

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

url, tokenizer = sys.argv[1:]
seat = {"harness": {"id": "verifiers_tasks"}, "runtime": {"type": "subprocess"}}
env = load_environment(resolve_env_config({"taskset": {"id": "verifiers_tasks"}, "player": seat}))
client = TrainClientConfig(
    base_url=url,
    api_key_var="EPISODE_KEY",
    renderer_model_name=tokenizer,
    renderer={"name": "qwen3"},
)
sampling = vf.SamplingConfig(temperature=1.0, max_tokens=64)
ctx = ModelContext(model="policy", client=client, sampling=sampling)


async def main():
    async with env.serving():
        (task,) = env.taskset.take(1)
        episode = await env.run_slot(env.slots(task)[0], ctx)
        found = {"ok": episode.ok, "errors": [str(one.message) for one in episode.errors]}
        for trace in episode.traces:
            found["errors"] += [str(one.message) for one in trace.errors]
            found["rewards"] = {name: one.value for name, one in trace.rewards.items()}
            found["branches"] = [
                {"ids": list(one.token_ids), "mask": [int(bit) for bit in one.sampled_mask]}
                for one in trace.branches
            ]
        print(json.dumps(found))


asyncio.run(main())
