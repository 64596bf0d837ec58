"""A taskset for verifiers: guess a number; the environment plays the user. Its harness posts from
this process, since verifiers' own download packages.
"""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult


class GuessTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float("[3]" in (trace.last_reply or ""))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        prompt, system = "Guess a number.", "Answer in brackets."
        yield GuessTask(vf.TaskData(prompt=prompt, system_prompt=system), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as chat:
            segment = await chat.turn()
            for left in (2, 1):
                if not segment.terminated and "[3]" not in segment.last_reply:
                    segment = await chat.turn(f"No. <|im_end|> {left} are left.")


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        code = 0 if answer.status_code == 200 else 1
        return ProgramResult(exit_code=code, stdout=answer.text, stderr="")


__all__ = ["GuessEnv", "GuessTaskset", "LoopHarness"]
