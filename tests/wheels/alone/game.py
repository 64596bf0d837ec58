"""An environment of two turns."""

from gcore_environments import Observation


class Twice:
    async def reset(self, row, seed):
        self.turns = 0
        return Observation(messages=row["messages"])

    async def step(self, reply):
        self.turns += 1
        if self.turns == 2:
            return Observation(rewards={"said": float(len(reply.text))}, done=True)
        return Observation(messages=[{"role": "user", "content": "ab"}])

    async def close(self):
        pass
