"""Games of TextArena, for one player or several."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from gcore_environments import Observation, Reply

try:
    import textarena
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution textarena is missing ({error})") from error


class TextArena:
    """Plays a game to its end. Each player reads what is new to that player.

    The reward is ``game`` in a game of one player, else ``PLAYER/game`` of each: "0/game",
    "1/game". The players' names are the library's numbers.

    A row's field ``number`` is the seed in place of the sample's, so that all samples of a prompt
    begin alike.

    game: its id, such as "TicTacToe-v0".
    players: how many the game is begun with.
    options: what it is made with.
    """

    def __init__(
        self, game: str, players: int = 1, options: Mapping[str, Any] | None = None
    ) -> None:
        self._game = game
        self._players = players
        self._options = dict(options or {})
        self._read: dict[int, str] = {}  # player -> all that it was told

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        seed = int(row.get("number", seed)) % 2**31
        random.seed(seed)
        self._random = random.getstate()
        with self._own_random():
            self._env = textarena.make(env_id=self._game, **self._options)
            self._env.reset(num_players=self._players, seed=seed)
            return self._told()

    async def step(self, reply: Reply) -> Observation:
        with self._own_random():
            done, _ = self._env.step(action=reply.text)
            if not done:
                return self._told()
            rewards, infos = self._env.close()
        reasons = [str(info.get("reason") or "") for info in infos.values()]
        return Observation(
            rewards={self._name(player): float(value) for player, value in rewards.items()},
            done=True,
            reason=next(filter(None, reasons), ""),
        )

    async def close(self) -> None:
        pass

    def _name(self, player: int) -> str:
        return "game" if self._players == 1 else f"{player}/game"

    def _told(self) -> Observation:
        """Tells the player whose turn it is what it has not read yet."""
        player, said = self._env.get_observation()
        whole = said if isinstance(said, str) else "\n".join(str(text) for _, text, *_ in said)
        before = self._read.get(player, "")
        self._read[player] = whole
        # Most games tell all that was said so far, some only how things stand.
        new = whole.removeprefix(before).strip() or whole
        return Observation(
            messages=[{"role": "user", "content": new}],
            player="" if self._players == 1 else str(player),
        )

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Games draw from the process's generator, which all its episodes share."""
        others = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)
