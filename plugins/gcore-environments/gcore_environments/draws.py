"""Plays an episode for each sample that the core asks for, and returns its record.

It stands between the core and the engine, and the core calls it as it would call the engine:

    requests -> submit -> open (host) -> observation -> turn (engine) -> reply (host) -> ...
    step <- one record for each episode that has ended

A *host* is a process in which environments run. Messages of hosts, requests that agents send to
the endpoint, and what other roles of the run say come through one inbox. It is read in ``step``
alone, so no other thread touches an episode.

In a deterministic run the engine is not advanced while an environment owes an observation, or a
role an answer: which turns are drawn together must not depend on which of them was quick.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, WorkerError, did_you_mean
from gcore_core.contract.generator import Finished, Generator, SampleRequest, TakesTokens
from gcore_core.contract.order import FIRST_QUESTION
from gcore_core.contract.questions import Answer
from gcore_core.contract.records import ABORTED, FAILED, FINISHED, TRUNCATED
from gcore_environments.endpoint import EndpointServer
from gcore_environments.episodes import Episode, EpisodeEnds, Rules, row_of
from gcore_environments.hosts import Host, Hosts, HostSettings
from gcore_environments.lateness import Lateness
from gcore_environments.questions import Asked, Refused
from gcore_environments.rendering import make_renderer
from gcore_environments.settings import PlayConfig
from gcore_environments.speakers import RoleSpoke, RoleTurn, RoleTurns
from gcore_environments.turns import Key, Turn, Turns

log = logging.getLogger(__name__)

#: After so many episodes that have ended by themselves, each player of a role has had a turn.
PLAYER_EPISODES = 32
#: Seconds that a step waits for environments when the engine has nothing to do.
_WAIT_S = 0.02
#: Seconds between two looks at the clocks of all episodes.
_LOOKS_EVERY_S = 0.05
#: Most characters of a record's reason, in which an environment's error may stand.
_REASON_CHARACTERS = 120


class EpisodeDraws:
    """Plays an episode for each request, in the environment of the settings.

    It implements Draws of ``gcore_core.contract.generator``. A request that is not for a sample,
    such as a reward's question, goes to the engine unchanged.

    Raises ConfigError where the environment's processes cannot be confined, and OSError where their
    interpreter cannot be started.
    """

    def __init__(self, config: PlayConfig, context: WorkerContext, generator: Generator) -> None:
        engine = cast(TakesTokens, generator)
        renderer = make_renderer(
            engine.tokenizer,
            engine.end_ids,
            history="keep" if config.history == "keep" else "strict",
            parser=config.parser,
        )
        self._config = config
        place, words = config.made()
        self._context = context
        self._engine = generator
        self._rules = Rules.of(
            engine,
            renderer,
            config,
            times=not context.deterministic,
            roles={player: speaker.role for player, speaker in context.speakers.items()},
        )
        self._turns = Turns(generator)
        self._lateness = Lateness(config.turn_s)
        self._hosts = Hosts(
            HostSettings(
                environment=place,
                config=words,
                python=config.python,
                number=config.hosts,
                turn_s=config.turn_s,
                sandbox=config.sandbox,
                variables={
                    name: os.environ[name] for name in config.variables if name in os.environ
                },
                readable=tuple(config.readable),
            )
        )
        # agents' requests come through the same queue, so that one wait is enough
        self._inbox: queue.Queue[Any] = cast("queue.Queue[Any]", self._hosts.replies)
        self._role_turns = RoleTurns(context.speakers, self._inbox)
        self._endpoint = EndpointServer(
            self._inbox,
            roles=set(self._rules.roles.values()),
            temperature=engine.temperature,
            top_p=engine.top_p,
            top_k=engine.top_k,
            context_length=engine.context_length,
            vocabulary=len(engine.tokenizer),
        )
        self._episodes: dict[Key, Episode] = {}
        self._records: list[Finished] = []
        self._looked_at = 0.0  # at the clocks of episodes
        self._starts_failed = 0  # how many hosts in a row ended before they were ready
        self._tools_looked_at = False
        self._told_of_tools: set[str] = set()  # roles of which the log says that they have tools
        self._told_of_failures: set[tuple[str, str]] = set()  # (role, reason) that the log has
        self._heard: set[str] = set()  # names of players who were asked to speak
        self._unheard = set(self._rules.roles)  # players of roles that have had no turn
        self._finished = 0  # episodes, while there are such players

    # -- the four verbs ----------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Opens an episode for each sample, and hands questions to the engine."""
        questions = [one for one in requests if one.ordinal >= FIRST_QUESTION]
        if questions:
            self._turns.ask(questions)
        for request in requests:
            if request.ordinal < FIRST_QUESTION:
                self._open(request)

    def step(self) -> list[Finished]:
        """Takes what environments say, advances the engine, and returns the records that ended.

        Raises WorkerError where the environment's processes do not start.
        """
        self._hear()
        self._end_late()
        if not self._rests():
            turns, answers = self._turns.step()
            self._records += answers
            with self._hosts.together():
                for turn, finished in turns:
                    self._policy_spoke(turn, finished)
        over, self._records = self._records, []
        return over

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Ends episodes now, and returns their records with what the policy has said so far.

        A turn that the engine is drawing goes into the record as far as it has come. An episode
        that has ended already, and whose record was not returned yet, keeps its status.
        """
        named = set(keys)
        self._records += self._turns.end_questions(keys)
        for key in keys:
            if key in self._episodes:
                self._finish(self._episodes[key], ABORTED, "")
        ended = [one for one in self._records if _key(one) in named]
        self._records = [one for one in self._records if _key(one) not in named]
        return ended

    def close(self) -> None:
        """Ends all processes of environments, and refuses agents. It leaves the engine open."""
        self._role_turns.close()
        self._endpoint.close()
        self._hosts.close()
        self._episodes.clear()

    # -- what environments and agents say ----------------------------------------------------------

    def _hear(self) -> None:
        """Takes messages that have come; waits a little where nothing else can be done.

        It ends after a while, also where agents send requests as fast as they are answered.
        """
        until = time.monotonic() + _WAIT_S
        while True:
            waits = not self._records and (not self._turns or self._rests())
            left_s = max(0.0, until - time.monotonic()) if waits else 0.0
            try:
                came = self._inbox.get(timeout=left_s)
            except queue.Empty:
                return
            self._take(came)
            if time.monotonic() > until:
                return

    def _rests(self) -> bool:
        """Whether the engine must not be advanced, since an environment or a role owes a word."""
        return self._context.deterministic and (
            bool(self._role_turns)
            or any(episode.waits_since is not None for episode in self._episodes.values())
        )

    def _take(self, came: Asked | RoleSpoke | tuple[Host, dict[str, Any]]) -> None:
        if isinstance(came, Asked):
            self._agent_asks(came)
            return
        if isinstance(came, RoleSpoke):
            self._role_spoke(came.turn, came.answer)
            return
        host, message = came
        if not self._hosts.is_current(host):
            return
        if message.get("ready"):
            self._host_is_ready(host)
        elif message.get("lost"):
            self._host_ended(host, str(message.get("error") or ""), bool(message.get("fatal")))
        elif "late" in message:
            self._host_names(host, message.get("current"))
        else:
            self._lateness.heard(host)
            self._environment_says(message)

    def _host_is_ready(self, host: Host) -> None:
        """Starts the clocks of a host's episodes: the time of its imports does not count."""
        host.ready = True
        self._starts_failed = 0
        if host.door is not None:
            self._endpoint.listen(host.door)
        for episode in self._episodes_of(host):
            episode.began = episode.waits_since = time.monotonic()

    def _environment_says(self, message: dict[str, Any]) -> None:
        """Has the policy answer an observation, or ends the episode that it belongs to."""
        episode = self._episodes.get(tuple(message["id"]))
        if episode is None or message.get("turn") != episode.heard:
            return  # its episode has ended meanwhile, or was drawn again
        self._context.progress()
        if "error" in message:
            self._environment_raised(episode, message)
            return
        if not message.get("done") and not message.get("truncated"):
            self._heard.add(str(message.get("player") or ""))
        self._play(episode, lambda: episode.observe(message))
        self._look_at_tools(message.get("messages") or (), message.get("tools") or ())

    def _environment_raised(self, episode: Episode, message: dict[str, Any]) -> None:
        log.warning("episode %s: %s\n%s", episode.key, message["error"], message.get("trace", ""))
        status, reason = episode.raised(str(message["error"]))
        self._finish(episode, status, reason)

    def _agent_asks(self, asked: Asked) -> None:
        """Has the policy answer an agent's request, or refuses it."""
        if asked.answer.done():
            return  # it was refused, since its episode has ended meanwhile
        episode = self._episodes.get(asked.key)
        if episode is None:
            asked.refuse(Refused(404, "This episode is over."))
            return
        self._context.progress()
        try:
            self._draw(episode.hear_role(asked) if asked.role else episode.hear(asked))
            self._look_at_tools(asked.messages, asked.tools)
        except Refused as refused:
            asked.refuse(refused)
        except Exception as error:  # isolation point: an agent's messages in an author's template
            asked.refuse(Refused(400, f"The messages cannot be read: {error}"))

    def _policy_spoke(self, turn: Turn, finished: Finished) -> None:
        """Tells an environment or an agent what the policy said."""
        episode = self._episodes.get(turn.key)
        if episode is None:
            return
        if turn.asked is not None:
            episode.answer(turn, turn.asked, finished)
            return

        def reply() -> None:
            told = episode.reply(turn, finished)
            episode.host.send(op="step", id=list(episode.key), **told)

        self._play(episode, reply)

    def _role_spoke(self, turn: RoleTurn, answer: Future[Answer]) -> None:
        """Tells an environment what another role said for a player."""
        if not self._role_turns.take(turn):
            return  # its episode has ended meanwhile, or was drawn again
        episode = self._episodes[turn.key]
        self._context.progress()

        def reply() -> None:
            said = _answer_of(turn, answer)
            self._look_at_failure(turn, said)
            if turn.asked is not None:
                episode.role_answer(turn, turn.asked, said)
            else:
                told = episode.role_reply(turn, said)
                episode.host.send(op="step", id=list(episode.key), **told)

        self._play(episode, reply)

    def _play(self, episode: Episode, act: Callable[[], Turn | RoleTurn | None]) -> None:
        """Does the next thing in an episode, and has the turn drawn that it returns.

        Where it raises, the episode ends.
        """
        try:
            turn = act()
        except EpisodeEnds as ends:
            self._finish(episode, ends.status, ends.reason)
        except Exception as error:  # isolation point: an author's messages, and a model's template
            log.warning("episode %s cannot go on", episode.key, exc_info=True)
            self._finish(episode, FAILED, f"environment_error: {type(error).__name__}: {error}")
        else:
            if turn is not None:
                self._draw(turn)

    def _draw(self, turn: Turn | RoleTurn) -> None:
        """Has the policy or a role speak."""
        if isinstance(turn, Turn):
            self._turns.draw(turn)
            return
        if turn.asked is None:
            self._unheard.discard(turn.player)
        else:  # an agent names a role, and no player
            self._unheard -= {
                player for player, role in self._rules.roles.items() if role == turn.role
            }
        self._role_turns.ask(turn)
        if turn.tools and turn.role not in self._told_of_tools:
            self._told_of_tools.add(turn.role)
            log.warning(
                "role %s is not told of the %d tools that player %r may call, since a role is "
                "asked by messages alone; tell them in a message",
                turn.role,
                len(turn.tools),
                turn.player,
            )

    def _look_at_failure(self, turn: RoleTurn, said: Answer) -> None:
        """Warns once of each reason for which a role could not answer."""
        failure = turn.role, said.reason
        if said.status == FAILED and failure not in self._told_of_failures:
            self._told_of_failures.add(failure)
            log.warning(
                "episode %s: role %s could not answer: %s; this is told once",
                turn.key,
                *failure,
            )

    def _look_at_tools(self, messages: Sequence[Any], tools: Sequence[Any]) -> None:
        """Warns once where a policy has tools that its chat template does not write."""
        if self._tools_looked_at or not tools or not messages:
            return
        self._tools_looked_at = True
        start = self._rules.renderer.start
        try:
            is_told = start(messages, tools) != start(messages)
        except Exception:  # isolation point: a template may demand tools, or refuse the messages
            return
        if not is_told:
            log.warning(
                "the model's chat template does not write tools, so the policy is not told of the "
                "%d that there are; take a model whose template does, or tell them in a message",
                len(tools),
            )

    # -- the life of an episode --------------------------------------------------------------------

    def _open(self, request: SampleRequest, lost: int = 0) -> None:
        """Begins an episode. One that is drawn again has the same seed.

        lost: how often it was drawn before, and suspected when its host was lost.
        """
        key = request.ordinal, request.sample
        episode = Episode(request, self._hosts.of(key), self._rules, lost=lost)
        self._episodes[key] = episode
        if request.prompt.images or request.images:
            self._finish(episode, FAILED, "images: an environment's policy reads none")
            return
        endpoint = {"base_url": self._endpoint.url, "api_key": self._endpoint.key(key)}
        episode.host.send(
            op="open",
            id=list(key),
            seed=request.seed,
            row=row_of(request),
            endpoint=endpoint,
        )

    def _finish(self, episode: Episode, status: str, reason: str) -> None:
        """Ends an episode, with its turns, its environment and its agent's key.

        ``step`` or ``abort`` returns its record.
        """
        if self._episodes.pop(episode.key, None) is None:
            return
        self._role_turns.end(episode.key)
        for turn, finished in self._turns.end(episode.key):
            episode.take(turn, finished)
        episode.leave()
        self._endpoint.forget(episode.key)
        episode.host.send(op="close", id=list(episode.key))
        reason = reason[:_REASON_CHARACTERS]
        self._records.append(episode.record(status, reason, self._engine.version))
        self._look_for_players(status)

    def _look_for_players(self, status: str) -> None:
        """Looks, once, for players whom a role speaks for and who never come up.

        Where the policy speaks for several players, one of them is likely to be that player under
        another name. Where it speaks for one at most, a player may come up later, as a judge does
        that is seldom asked; then this warns.

        Raises ConfigError in the first case.
        """
        if not self._unheard or status != FINISHED:
            return
        self._finished += 1
        if self._finished != PLAYER_EPISODES:
            return
        player, heard = min(self._unheard), sorted(self._heard - {""})
        told = (
            f"no turn of the first {PLAYER_EPISODES} episodes was this player's"
            f"{did_you_mean(player, heard)}."
        )
        if len(self._heard - set(self._rules.roles)) <= 1:
            log.warning("environment.roles.%s: %s", player, told)
            return
        raise ConfigError(
            told,
            where=f"environment.roles.{player}",
            why=f"the players that observations named: {', '.join(heard) or 'none'}; a program "
            f"may ask for the model {self._rules.roles[player]}, and none did",
            todo="name a player as the environment does, or leave this one out",
        )

    # -- hosts that are late or gone ---------------------------------------------------------------

    def _end_late(self) -> None:
        """Ends episodes whose time is over, and replaces hosts that do not answer.

        Raises WorkerError where hosts do not get ready, ``retries`` times more than once.
        """
        now = time.monotonic()
        if now < self._looked_at + _LOOKS_EVERY_S:
            return
        self._looked_at = now
        if self._role_turns:  # a role has deadlines of its own: one that hangs is told of as lost
            self._context.progress()
        if self._config.episode_s:
            for episode in list(self._episodes.values()):
                if episode.host.ready and now - episode.began > self._config.episode_s:
                    self._finish(episode, TRUNCATED, "time")
        for host in self._not_ready(now):
            self._host_ended(host, f"it was not ready within {self._config.start_s:g} s")
        for host in self._lateness.look(self._episodes, now):
            self._replace(host, "it did not say which episode holds it up")

    def _not_ready(self, now: float) -> set[Host]:
        """Returns the hosts whose imports have taken longer than ``start_s``."""
        return {
            episode.host
            for episode in self._episodes.values()
            if not episode.host.ready and now - episode.began > self._config.start_s
        }

    def _host_names(self, host: Host, current: object) -> None:
        """Fails the episode that is late by itself, or the one that holds up its host.

        current: name of the host's task that runs now; None where all of them wait.
        """
        late, guilty = self._lateness.answer(
            host, _key_of_task(current), self._episodes, time.monotonic()
        )
        if late is not None:
            host.send(op="cancel", id=list(late.key))
            self._finish(
                late, FAILED, f"environment_hung: it awaited for {self._config.turn_s:g} s"
            )
        if guilty is not None:
            reason = f"environment_hung: it ran for {self._config.turn_s:g} s without an await"
            self._finish(guilty, FAILED, reason)
            self._replace(host, "")

    def _host_ended(self, host: Host, error: str, fatal: bool = False) -> None:
        """Replaces a host that has ended by itself, or did not get ready in time.

        fatal: whether any other host would end for the same reason.

        Raises WorkerError where that is so, or where too many in a row did not get ready.
        """
        if not host.ready:
            self._starts_failed += 1
            if fatal or self._starts_failed > self._config.retries:
                raise WorkerError(
                    f"the environment {self._config.made()[0]} does not start.",
                    where="environment.config",
                    why=error or "its process ended before it was ready",
                    todo="run its file by itself; see the worker's log for what it printed",
                )
        self._replace(host, error or "its process ended")

    def _replace(self, host: Host, error: str) -> None:
        """Replaces a host. All its episodes are drawn again with their seeds.

        error: why it is lost, where no episode is known to be guilty. Then each is suspected, and
            one that is suspected more than ``retries`` times fails. "": the guilty one is known,
            and has failed already.
        """
        self._lateness.forget(host)
        episodes = self._episodes_of(host)
        if host.door is not None:
            self._endpoint.leave(host.door)
        self._hosts.replace(host)
        for episode in episodes:
            lost = episode.lost + bool(error)
            if lost > self._config.retries:
                self._finish(episode, FAILED, f"environment_lost: {error}")
                continue
            self._turns.end(episode.key)
            self._role_turns.end(episode.key)
            episode.leave()
            self._open(episode.request, lost)

    def _episodes_of(self, host: Host) -> list[Episode]:
        return [episode for episode in self._episodes.values() if episode.host is host]


def _answer_of(turn: RoleTurn, answer: Future[Answer]) -> Answer:
    """Returns what a role has answered. Raises EpisodeEnds where it gave no answer."""
    try:
        return answer.result()
    except Exception as error:  # isolation point: whatever befell the role, or the way to it
        log.warning("episode %s: role %s gave no answer", turn.key, turn.role, exc_info=True)
        reason = f"role_lost: {turn.role}: {type(error).__name__}: {error}"
        raise EpisodeEnds(FAILED, reason) from error


def _key(finished: Finished) -> Key:
    return finished.request.ordinal, finished.request.sample


def _key_of_task(name: object) -> Key | None:
    """Returns the episode of a host's task, named "episode:ORDINAL.SAMPLE"; None for another."""
    kind, _, key = str(name or "").partition(":")
    if kind != "episode":
        return None
    ordinal, _, sample = key.partition(".")
    return int(ordinal), int(sample)
