"""Plays episodes by verifiers 0.4, for episode_rivals.py; and the taskset that they are of.

    python benchmarks/verifiers_episodes.py URL TOKENIZER one|each

Its train client renders, and sends prompts by ids to the engine at the URL. The harness posts from
this process, since verifiers' own download packages: through one client for all, or through a new
one each time, as a program does that is started for each turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

import episode_rounds as rounds
import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class GuessTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for _ in range(rounds.EPISODES):
            yield GuessTask(vf.TaskData(prompt=rounds.ASKED, system_prompt=None), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """The environment plays the user."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as chat:
            await chat.turn()
            for turn in range(1, rounds.TURNS):
                await chat.turn(rounds.told(turn))


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    """Posts the conversation to verifiers' own endpoint."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    client: httpx.AsyncClient | None = None
    """The one for all; None: each time a new one."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: Any = None,
    ) -> ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(message) for message in prompt or []]
        )
        async with contextlib.AsyncExitStack() as stack:
            client = self.client
            if client is None:
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        code = 0 if answer.status_code == 200 else 1
        return ProgramResult(exit_code=code, stdout=answer.text, stderr="")


__all__ = ["GuessEnv", "GuessTaskset", "LoopHarness"]


def main() -> None:
    import verifiers_episodes  # as verifiers imports it, by its name

    url, tokenizer, clients = sys.argv[1:]
    os.environ["EPISODE_KEY"] = "none"
    seat = {"harness": {"id": "verifiers_episodes"}, "runtime": {"type": "subprocess"}}
    place = {"taskset": {"id": "verifiers_episodes"}, "player": seat}
    env = load_environment(resolve_env_config(place))
    client = TrainClientConfig(
        base_url=url,
        api_key_var="EPISODE_KEY",
        renderer_model_name=tokenizer,
        renderer={"name": "qwen3"},
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=64)
    context = ModelContext(model="policy", client=client, sampling=sampling)

    async def play() -> dict[str, Any]:
        slots = [env.slots(task)[0] for task in env.taskset.take(rounds.EPISODES)]
        began_s = rounds.cpu_s()
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
        taken_s = rounds.cpu_s() - began_s
        errors = [str(error.message) for episode in episodes for error in episode.errors]
        traces = [trace for episode in episodes for trace in episode.traces]
        errors += [str(error.message) for trace in traces for error in trace.errors]
        branches = [branch for trace in traces for branch in trace.branches]
        return {
            "cpu_s": taken_s,
            "errors": errors,
            "episodes": [
                {"ids": list(one.token_ids), "sampled": [int(bit) for bit in one.sampled_mask]}
                for one in branches
            ],
        }

    with asyncio.Runner() as runner:
        if clients == "one":
            verifiers_episodes.LoopHarness.client = httpx.AsyncClient(timeout=60)
        serving = env.serving()
        runner.run(serving.__aenter__())
        rounds.serve(lambda: runner.run(play()))
        runner.run(serving.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
