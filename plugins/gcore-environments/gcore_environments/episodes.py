"""Holds one episode: what the policy was told, what it said, and the record that comes of it.

    observation -> ids (the renderer) -> a turn (the engine) -> the book -> a reply -> observation

An environment sends observations, which are appended to the conversation. A program's agent sends
the whole conversation each time, and the book says where it goes on. The same limits hold for the
turns of both.

A player may be spoken for by another role of the run. What that role says is told, and stands in
the column ``episode``; the book has nothing of it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gcore_language.prompts import decode
from gcore_language.turns import text_of

from gcore_core.contract.columns import VERSION, Columns
from gcore_core.contract.generator import Finished, SampleRequest, TakesTokens
from gcore_core.contract.questions import Answer
from gcore_core.contract.records import FAILED, FINISHED, TRUNCATED, Prompt
from gcore_environments.book import Book
from gcore_environments.hosts import Host
from gcore_environments.limits import Limits
from gcore_environments.matching import answer_of, answered, place, place_ids
from gcore_environments.questions import IDS, Asked, Drawn, Refused
from gcore_environments.records import columns_of, cost_of
from gcore_environments.rendering import Renderer, Said
from gcore_environments.settings import PlayConfig
from gcore_environments.speakers import RoleTurn
from gcore_environments.turns import Key, Turn, seed_of_turn

Message = dict[str, Any]


class EpisodeEnds(Exception):
    """Raised where an episode ends.

    status, reason: those of its record.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Holds what all episodes of a worker have in common.

    drift: what happens where a history does not continue what was said: "fork" begins another
        sequence; "error" refuses an agent's request, and fails an environment's episode.
    times: whether records say how long an episode took. Those of a deterministic run do not, since
        they must be the same each time.
    roles: player -> the role that speaks for it; the policy speaks for all others.
    """

    engine: TakesTokens
    renderer: Renderer
    limits: Limits
    drift: str
    times: bool
    roles: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        engine: TakesTokens,
        renderer: Renderer,
        config: PlayConfig,
        *,
        times: bool,
        roles: Mapping[str, str],
    ) -> Rules:
        limits = Limits(
            turns=config.turns,
            turn_tokens=config.turn_tokens,
            tokens=engine.max_actions,
            context_length=engine.context_length,
        )
        return cls(
            engine=engine,
            renderer=renderer,
            limits=limits,
            drift=config.drift,
            times=times,
            roles=roles,
        )

    def prompt(self, messages: list[Message]) -> Prompt:
        """Returns what a role is asked.

        It is a chat where the policy reads chats. Else it is a text, in which the policy's end
        token stands behind each answer, as the policy reads its own.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template:
            return Prompt(row=0, messages=messages)
        ends = {"assistant": tokenizer.eos_token}
        return Prompt(
            row=0,
            text="".join(text_of(one["content"]) + ends.get(one["role"], "") for one in messages),
        )


@dataclass
class Line:
    """Holds the conversation of one player.

    sequence: number of the book's sequence in which it goes on; -1 before its first turn, and
        where a role speaks for it.
    messages: all so far, in the form of chat completions.
    tools: that it may call, in the same form.
    """

    sequence: int = -1
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Message] = ()


class Episode:
    """Plays one sample of a prompt in an environment.

    key: (ordinal, sample) of the request.
    host: the process in which its environment runs.
    lost: how often it was drawn before, and suspected when its host was lost.
    heard: how many replies its host has got. An observation has the number of the reply that it
        follows.
    began: when it was opened, or when its host got ready, by ``time.monotonic``.
    waits_since: when the environment began to work, by the same clock; None while the policy is to
        speak.
    rewards: sum of the environment's rewards so far, by name.
    """

    def __init__(self, request: SampleRequest, host: Host, rules: Rules, *, lost: int = 0) -> None:
        self.request = request
        self.key: Key = (request.ordinal, request.sample)
        self.host = host
        self.lost = lost
        self.heard = 0
        self.began = time.monotonic()
        self.waits_since: float | None = self.began
        self.book = Book()
        self.rewards: dict[str, float] = {}
        self._rules = rules
        self._lines: dict[str, Line] = {}
        self._prompts: dict[int, np.ndarray] = {}  # of each sequence, its latest
        self._turns_begun = 0  # how many turns were asked for, also of roles
        self._waiting_agents: set[Asked] = set()  # requests that are to be answered
        self._unparsed = 0
        self._is_cut = False  # whether the latest turn ended at a limit
        self._refused_for = ""  # why an agent was refused a turn
        self._versions: tuple[int, int] | None = None
        self._environment_s = 0.0

    # -- an environment's turns --------------------------------------------------------------------

    def observe(self, observation: Mapping[str, Any]) -> Turn | RoleTurn:
        """Takes an observation, and returns the turn that the policy or a role is to have next.

        Raises EpisodeEnds where the episode is over, or has come to a limit.
        """
        self._stop_clock()
        self._reward(observation.get("rewards") or {})
        if observation.get("truncated"):
            raise EpisodeEnds(TRUNCATED, str(observation.get("reason") or "environment"))
        if observation.get("done"):
            raise EpisodeEnds(
                TRUNCATED if self._refused_for else FINISHED,
                self._refused_for or str(observation.get("reason") or ""),
            )
        player = str(observation.get("player") or "")
        line = self._lines.setdefault(player, Line())
        line.tools = tuple(observation.get("tools") or line.tools)
        new = list(observation["messages"])
        if role := self._rules.roles.get(player):
            self._room(_ends, tokens=0)
            line.messages += new
            return self._begin_role_turn(role, line, player=player)
        sequence, most = self._continue(line, new)
        line.sequence = sequence
        line.messages += new
        return self._begin_turn(sequence, most, player=player, tools=line.tools)

    def _continue(self, line: Line, new: list[Message]) -> tuple[int, int]:
        """Writes new messages into the book.

        Returns (sequence that has them, most actions of the next turn).

        Raises EpisodeEnds at a limit.
        """
        book, renderer = self.book, self._rules.renderer
        most = self._room(_ends)
        if line.sequence < 0:
            ids = renderer.start(new, line.tools)
            most = self._room(_ends, read=len(ids))
            return book.start(ids, cause="player"), most
        before = book.sequences[line.sequence].ids
        bridge = renderer.bridge(before, new, line.tools)
        if bridge is None:
            if self._rules.drift == "error":
                raise EpisodeEnds(FAILED, "no_bridge: the chat template rewrites earlier turns")
            ids = renderer.start([*line.messages, *new], line.tools)
            most = self._room(_ends, read=len(ids))
            return book.start(ids, cause="template"), most
        length = len(before) - bridge.drop
        most = self._room(_ends, read=length + len(bridge.ids))
        return book.go_on(line.sequence, length, bridge.ids, cause="boundary"), most

    def _room(
        self,
        at_limit: Callable[[str], Exception],
        *,
        read: int = 0,
        most: int = 0,
        tokens: int | None = None,
    ) -> int:
        """Returns the most actions of the next turn.

        at_limit: makes what is raised at a limit, of the limit's name.
        most: the limit of an agent's request itself; 0: none.
        tokens: how many count; None: all that the policy has said. For a role none do.
        """
        tokens = self.book.actions if tokens is None else tokens
        room, reason = self._rules.limits.next_turn(
            turns=self._turns_begun, tokens=tokens, read=read, most=most
        )
        if not room:
            raise at_limit(reason)
        return room

    def reply(self, turn: Turn, finished: Finished) -> dict[str, Any]:
        """Takes what the policy said in a turn; returns what the environment is told.

        Raises EpisodeEnds where the engine could draw nothing.
        """
        ids = self.take(turn, finished)
        if finished.status == FAILED:
            raise EpisodeEnds(TRUNCATED if self.book.actions else FAILED, finished.reason)
        return self._told(turn.player, self._said(ids, turn.tools), finished.status)

    def role_reply(self, turn: RoleTurn, answer: Answer) -> dict[str, Any]:
        """Takes what a role said in a turn; returns what the environment is told.

        Raises EpisodeEnds where the role could say nothing.
        """
        if answer.status == FAILED:
            status = TRUNCATED if self.book.actions else FAILED
            raise EpisodeEnds(status, f"role_failed: {turn.role}: {answer.reason}")
        self._is_cut = answer.status != FINISHED
        return self._told(
            turn.player, self._rules.renderer.read(answer.text, turn.tools), answer.status
        )

    def _told(self, player: str, said: Said, status: str) -> dict[str, Any]:
        self._lines[player].messages.append(answer_of(said))
        self.heard += 1
        self._start_clock()
        return {
            "turn": self.heard,
            "text": said.text,
            "reasoning": said.reasoning,
            "calls": [_tool_call(call) for call in said.calls],
            "status": FINISHED if status == FINISHED else TRUNCATED,
            "player": player,
        }

    # -- an agent's turns --------------------------------------------------------------------------

    def hear(self, asked: Asked) -> Turn:
        """Writes an agent's request into the book, and returns the turn that answers it.

        Raises Refused at a limit, before anything is written. The agent may still end by itself.
        """
        rules, book = self._rules, self.book

        def fits(read: int) -> None:
            self._room(self._refusal, read=read, most=asked.most)

        fits(0)
        line = self._lines.setdefault("", Line())
        if asked.kind == IDS:
            sequence = place_ids(book, asked.ids, rules.drift, fits)
        else:
            sequence = place(book, rules.renderer, asked.messages, asked.tools, rules.drift, fits)
            line.messages, line.tools = list(asked.messages), asked.tools
        read = len(book.sequences[sequence].ids)
        most = self._room(self._refusal, read=read, most=asked.most)
        self._wait(asked)
        return self._begin_turn(sequence, most, tools=asked.tools, stop=asked.stop, asked=asked)

    def hear_role(self, asked: Asked) -> RoleTurn:
        """Takes an agent's request to another role, and returns the turn that answers it.

        Raises Refused at the limit of turns.
        """
        self._room(self._refusal, tokens=0)
        player = next(name for name, role in self._rules.roles.items() if role == asked.role)
        line = self._lines.setdefault(player, Line())
        line.messages, line.tools = list(asked.messages), asked.tools
        self._wait(asked)
        return self._begin_role_turn(asked.role, line, player=player, asked=asked)

    def _wait(self, asked: Asked) -> None:
        self._waiting_agents.add(asked)
        self._stop_clock()

    def _is_answered(self, asked: Asked) -> None:
        self._waiting_agents.discard(asked)
        if not self._waiting_agents:
            self._start_clock()

    def _refusal(self, reason: str) -> Refused:
        """Notes the limit at which an agent is refused a turn, and makes what it is told."""
        self._refused_for = reason
        return Refused(400, f"The episode has reached a limit ({reason}); end it.", reason)

    def answer(self, turn: Turn, asked: Asked, finished: Finished) -> None:
        """Takes what the policy said in answer to an agent's request, and sends it."""
        self._is_answered(asked)
        ids = self.take(turn, finished)
        if finished.status == FAILED:
            self._refused_for = finished.reason
            asked.refuse(Refused(400, f"The engine drew nothing ({finished.reason})."))
            return
        sequence = self.book.sequences[turn.sequence]
        said = self._said(ids, turn.tools)
        if asked.kind != IDS:
            answered(self.book, turn.sequence, asked.messages, asked.tools, said, asked.stop)
            # not behind the messages of another request that came meanwhile
            self._lines[""].messages = list(asked.messages)
        self._lines[""].messages.append(answer_of(said, asked.stop))
        asked.reply(
            Drawn(
                prompt_ids=turn.ids.tolist(),
                ids=ids,
                logp=sequence.logp[len(sequence.logp) - len(ids) :],
                said=said,
                status=FINISHED if finished.status == FINISHED else TRUNCATED,
            )
        )

    def role_answer(self, turn: RoleTurn, asked: Asked, answer: Answer) -> None:
        """Takes what a role said in answer to an agent's request, and sends it."""
        self._is_answered(asked)
        if answer.status == FAILED:
            self._refused_for = f"role_failed: {turn.role}: {answer.reason}"
            asked.refuse(Refused(400, f"The role {turn.role} said nothing ({answer.reason})."))
            return
        said = self._rules.renderer.read(answer.text, turn.tools)
        line = self._lines[turn.player]
        line.messages = [*asked.messages, answer_of(said, asked.stop)]
        asked.reply(
            Drawn(
                prompt_ids=[],
                ids=[],
                logp=[],
                said=said,
                status=FINISHED if answer.status == FINISHED else TRUNCATED,
                counted=(answer.n_prompt, answer.n_actions),
            )
        )

    # -- what both have ----------------------------------------------------------------------------

    def take(self, turn: Turn, finished: Finished) -> list[int]:
        """Writes what was sampled in a turn into the book, and returns its ids, perhaps none."""
        columns = finished.columns
        if finished.status == FAILED or "action_ids" not in columns:
            self.book.sampled(turn.sequence, [], [], [])
            return []
        ids: list[int] = columns["action_ids"].tolist()
        versions = [finished.versions[0]] * len(ids)
        if VERSION in columns:
            versions = columns[VERSION].tolist()
        player = list(self._policys_lines()).index(turn.player)
        self.book.sampled(turn.sequence, ids, columns["logp"].tolist(), versions, player)
        if ids:
            # an agent's turns may overlap, so the turn that ends first may have begun last
            first, last = self._versions or finished.versions
            self._versions = min(first, finished.versions[0]), max(last, finished.versions[1])
            self._is_cut = finished.status != FINISHED
        return ids

    def raised(self, error: str) -> tuple[str, str]:
        """Returns (status, reason) of an episode whose environment has raised.

        It has failed, unless a program gave up because it was refused a turn at a limit: that is
        truncated.
        """
        if self._refused_for and self.book.actions:
            return TRUNCATED, self._refused_for
        return FAILED, f"environment_error: {error}"

    def leave(self) -> None:
        """Refuses the requests of agents that still wait for the policy."""
        for asked in self._waiting_agents:
            asked.refuse(Refused(404, "This episode is over."))
        self._waiting_agents.clear()

    def record(self, status: str, reason: str, version: int) -> Finished:
        """Makes the record of the episode as it ended.

        An episode that has finished, but whose last turn was cut by a limit, is truncated. One that
        ended by itself or at a limit before the policy had said anything has failed.

        version: of the weights now, for a record in which nothing was sampled.
        """
        if status in (FINISHED, TRUNCATED) and not self.book.actions:
            status, reason = FAILED, f"{reason or 'no_turn'}: {_NO_TURN}"
        elif status == FINISHED and self._is_cut:
            status, reason = TRUNCATED, "length"
        columns: Columns = {}
        if status != FAILED:
            columns = self._columns()
        return Finished(
            request=self.request,
            status=status,
            versions=self._versions or (version, version),
            reason=reason,
            columns=columns,
            cost=cost_of(self.book) if columns else 0.0,
        )

    def _columns(self) -> Columns:
        if not self.book.sequences:
            return _NOTHING
        engine = self._rules.engine
        said = [
            token
            for one in self.book.sequences
            for begin, end, *_ in one.spans
            for token in one.ids[begin:end]
        ]
        temperature = 1.0 if self.request.greedy else (engine.temperature or 1.0)
        return columns_of(
            self.book,
            temperature=temperature,
            text=decode(engine.tokenizer, [said])[0],
            episode=self._report(),
        )

    def _report(self) -> dict[str, Any]:
        """Returns the column ``episode``: what rewards and people may read of it, for JSON."""
        told: dict[str, Any] = {
            "messages": next(iter(self._policys_lines().values())).messages,
            "rewards": self.rewards,
            "turns": sum(len(one.spans) for one in self.book.sequences),
            "forks": dict(self.book.forks),
            "unparsed": self._unparsed,
        }
        if len(self._lines) > 1:
            told["players"] = {name: line.messages for name, line in self._lines.items()}
        if self._rules.times:
            whole_s = time.monotonic() - self.began
            told["time"] = {"episode_s": whole_s, "environment_s": self._environment_s}
            told["lost"] = self.lost
        return told

    def _begin_turn(self, sequence: int, most: int, **fields: Any) -> Turn:
        turn = Turn(
            key=self.key,
            sequence=sequence,
            ids=self._prompt(sequence),
            seed=seed_of_turn(self.request.seed, self._turns_begun),
            most=most,
            greedy=self.request.greedy,
            **fields,
        )
        self._turns_begun += 1
        return turn

    def _prompt(self, sequence: int) -> np.ndarray:
        """Returns all ids of a sequence. Only those that are new since its last turn are made."""
        before = self._prompts.get(sequence, _NO_IDS)
        new = np.array(self.book.sequences[sequence].ids[len(before) :], np.int32)
        self._prompts[sequence] = np.concatenate([before, new])
        return self._prompts[sequence]

    def _begin_role_turn(self, role: str, line: Line, **fields: Any) -> RoleTurn:
        turn = RoleTurn(
            key=self.key,
            role=role,
            prompt=self._rules.prompt(list(line.messages)),
            seed=seed_of_turn(self.request.seed, self._turns_begun),
            tools=line.tools,
            **fields,
        )
        self._turns_begun += 1
        return turn

    def _policys_lines(self) -> dict[str, Line]:
        """Returns the conversations in which the policy speaks."""
        return {name: one for name, one in self._lines.items() if name not in self._rules.roles}

    def _said(self, ids: list[int], tools: Sequence[Message]) -> Said:
        said = self._rules.renderer.reply(ids, tools)
        self._unparsed += said.unparsed
        return said

    def _reward(self, rewards: Mapping[str, Any]) -> None:
        for name, value in rewards.items():
            if not math.isfinite(value):
                raise EpisodeEnds(FAILED, f"environment_error: reward {name} is {value}")
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)
            sequence = self._sequence_of(name)
            if sequence is not None:
                self.book.reward(float(value), sequence)

    def _sequence_of(self, reward: str) -> int | None:
        """Returns the sequence to whose latest turn a reward goes.

        It is that of the player whom the reward names, as in "1/game", or -1, the latest of all,
        where it names none. None: its player has had no turn of the policy, and no other has
        earned it.
        """
        player, slash, _ = reward.partition("/")
        if not slash:
            return -1
        if player in self._rules.roles:
            return None
        lines = self._policys_lines()
        if player in lines:
            return lines[player].sequence
        has_players = any(lines)  # the name of a player that is alone is empty
        return None if has_players else -1

    def _start_clock(self) -> None:
        self.waits_since = time.monotonic()

    def _stop_clock(self) -> None:
        if self.waits_since is not None:
            self._environment_s += time.monotonic() - self.waits_since
        self.waits_since = None


def _ends(reason: str) -> EpisodeEnds:
    """Makes what ends an environment's episode at a limit."""
    return EpisodeEnds(TRUNCATED, reason)


#: Stands in the reason of an episode that has failed for that.
_NO_TURN = "it was over before the policy had said anything"

_NO_IDS = np.zeros(0, np.int32)
#: Columns of an episode that was aborted before its first observation.
_NOTHING: Columns = {
    "prompt_ids": np.zeros(0, np.int32),
    "action_ids": np.zeros(0, np.int32),
    "logp": np.zeros(0, np.float32),
    "action_mask": np.zeros(0, np.uint8),
    "turn_reward": np.zeros(0, np.float32),
    "temperature": np.array(1.0, np.float32),
    "text": np.zeros(0, np.uint8),
}


def row_of(request: SampleRequest) -> dict[str, Any]:
    """Returns a row as an environment sees it: text, messages, and its further fields."""
    prompt = request.prompt
    messages = prompt.messages or [{"role": "user", "content": prompt.text or ""}]
    text = prompt.text
    if text is None:
        text = "\n".join(str(message.get("content") or "") for message in messages)
    return {**prompt.fields, "prompt": text, "messages": messages}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of chat completions as an environment gets it."""
    function = call["function"]
    text = str(function["arguments"])
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    return {
        "name": function["name"],
        "arguments": arguments if isinstance(arguments, dict) else None,
        "text": text,
        "id": call["id"],
    }
