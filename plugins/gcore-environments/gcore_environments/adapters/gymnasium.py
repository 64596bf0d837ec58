"""Environments of Gymnasium whose actions are numbered, told as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_environments import Observation, Reply

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution gymnasium is missing ({error})") from error


class Gymnasium:
    """Makes an environment anew for each episode, and tells its states by a template.

    An answer's last number is the action, or the last of the names of actions that it has. One
    without any is told so, and costs ``unread``.

    A row's field ``number`` is the seed in place of the sample's, so that all samples of a prompt
    begin alike.

    id: as ``gymnasium.make`` takes it. "module:id" imports the module first.
    options: what it is made with.
    template: may have {state}, {last}: the largest action, {actions}: names or numbers of all, and
        {text}: what the environment draws in text.
    actions: their names, from 0 on.
    """

    def __init__(
        self,
        id: str,
        template: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        unread: float = 0.0,
    ) -> None:
        self._env = gymnasium.make(id, **(options or {}))
        if not isinstance(self._env.action_space, gymnasium.spaces.Discrete):
            raise TypeError(
                f"the actions of {id} are no numbers but {self._env.action_space}: write a class "
                "of your own that makes them from text"
            )
        space = self._env.action_space
        self._start = int(space.start)
        self._names = list(actions) or [str(self._start + n) for n in range(int(space.n))]
        if len(self._names) != space.n:
            raise ValueError(f"{id} has {space.n} actions, and actions names {len(self._names)}")
        self._template = template
        self._unread = unread
        words = sorted(map(re.escape, self._names), key=len, reverse=True)
        self._word = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", re.IGNORECASE)

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        seed = int(row.get("number", seed)) % 2**31
        state, _ = self._env.reset(seed=seed)
        self._env.action_space.seed(seed)
        return self._told(state)

    async def step(self, reply: Reply) -> Observation:
        found = self._word.findall(reply.text)
        if not found:
            text = f"Answer with one of: {', '.join(self._names)}."
            rewards = {"unread": -self._unread} if self._unread else {}
            return Observation(messages=[{"role": "user", "content": text}], rewards=rewards)
        names = [name.lower() for name in self._names]
        action = self._start + names.index(found[-1].lower())
        state, reward, done, truncated, _ = self._env.step(action)
        rewards = {"game": float(reward)}
        if done or truncated:
            return Observation(rewards=rewards, done=done, truncated=truncated and not done)
        return self._told(state, rewards)

    async def close(self) -> None:
        self._env.close()

    def _told(self, state: Any, rewards: dict[str, float] | None = None) -> Observation:
        text = self._template.format(
            state=state,
            last=self._names[-1],
            actions=", ".join(self._names),
            text=_Drawn(self._env),
        )
        return Observation(messages=[{"role": "user", "content": text}], rewards=rewards or {})


class _Drawn:
    """Draws an environment in text once a template asks for it."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __str__(self) -> str:
        if self._env.render_mode == "ansi":
            return str(self._env.render())
        draws = getattr(self._env.unwrapped, "pprint_grid", None)  # minigrid's
        return str(draws() if draws else self._env.unwrapped)

    def __format__(self, how: str) -> str:
        return format(str(self), how)
