"""Another role of the run speaks for a player: what it reads, and what of it a record has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gcore_environments import draws as draws_module
from gcore_environments.adapter_settings import TextArenaConfig
from gcore_environments.checks import problems
from gcore_environments.draws import EpisodeDraws
from gcore_environments.questions import Asked
from gcore_environments.scripted import ScriptedEngine
from gcore_environments.settings import EnvironmentConfig

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, WorkerDied
from gcore_core.contract.factories import import_file
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import ABORTED, FAILED, FINISHED, TRUNCATED, Prompt

HERE = Path(__file__).parent
PATIENCE_S = 60.0


@dataclass
class Scripted:
    """Is a role that answers at once, unless it is told to wait.

    says: what it says to what it reads.
    """

    says: Callable[[Question], Answer | Exception] = lambda question: said("7")
    role: str = "opponent"
    waits: bool = False
    asked: list[Question] = field(default_factory=list)
    owed: list[Future[Answer]] = field(default_factory=list)

    def ask(self, question: Question) -> Future[Answer]:
        self.asked.append(question)
        self.owed.append(Future())
        if not self.waits:
            self.answer(len(self.owed) - 1)
        return self.owed[-1]

    def answer(self, number: int) -> None:
        answer = self.says(self.asked[number])
        if isinstance(answer, Exception):
            self.owed[number].set_exception(answer)
        else:
            self.owed[number].set_result(answer)


def said(text: str, status: str = FINISHED, reason: str = "") -> Answer:
    return Answer(text=text, status=status, reason=reason)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    task = import_file(HERE.parents[2] / "recipes" / "quickstart" / "arithmetic.py")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=task._tokenizer(), bos_token="<bos>", eos_token="<eos>"
    )


Make = Callable[..., EpisodeDraws]


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Iterator[Make]:
    """Makes draws of the game of seats.py, in which players "1" and "2" speak in turn."""
    made: list[EpisodeDraws] = []

    def draws(
        speakers: Mapping[str, Scripted],
        environment: str = "seats.py:Seats",
        *,
        deterministic: bool = False,
        max_actions: int = 4096,
        progress: Callable[[], None] = lambda: None,
        **config: Any,
    ) -> EpisodeDraws:
        settings = {"environment": f"{HERE}/{environment}", "turn_s": PATIENCE_S, **config}
        context = WorkerContext(
            role="rollout",
            deterministic=deterministic,
            directory=str(tmp_path),
            speakers=dict(speakers),
            progress=progress,
        )
        engine = ScriptedEngine(tokenizer, lambda text: "25", max_actions=max_actions)
        made.append(EpisodeDraws(EnvironmentConfig(**settings), context, engine))
        return made[-1]

    yield draws
    for one in made:
        one.close()


def request(ordinal: int = 0) -> SampleRequest:
    return SampleRequest(
        ordinal=ordinal, sample=0, seed=1000 + ordinal, prompt=Prompt(row=0, text="1")
    )


def until(draws: EpisodeDraws, ready: Callable[[list[Finished]], object]) -> list[Finished]:
    """Steps until ``ready`` of the records so far, and returns these."""
    ended: list[Finished] = []
    until_s = time.monotonic() + PATIENCE_S
    while not ready(ended):
        assert time.monotonic() < until_s
        ended += draws.step()
    return ended


def play(draws: EpisodeDraws) -> Finished:
    draws.submit([request()])
    (record,) = until(draws, len)
    return record


def told(record: Finished) -> dict[str, Any]:
    return dict(json.loads(record.columns["episode"].tobytes()))


# -- what a record has -----------------------------------------------------------------------------


def test_nothing_that_a_role_said_is_among_the_tokens(make: Make, tokenizer: Any) -> None:
    record = play(make({"2": Scripted()}))
    assert (record.status, record.reason) == (FINISHED, "")
    assert tokenizer.decode(record.columns["prompt_ids"]) == "<bos>1+"
    assert tokenizer.decode(record.columns["action_ids"]) == "25<eos>1+25<eos>"
    assert record.columns["turns"][:, 3].tolist() == [0, 0]
    assert len(record.columns["sequences"]) == 1


def test_what_a_role_said_stands_among_the_players(make: Make) -> None:
    episode = told(play(make({"2": Scripted()})))
    assert [one["content"] for one in episode["players"]["2"]] == ["2+", "7", "2+", "7"]
    assert [one["content"] for one in episode["messages"]] == ["1+", "25", "1+", "25"]
    assert episode["turns"] == 2


def test_the_messages_are_the_policys_where_a_role_speaks_first(make: Make) -> None:
    record = play(make({"1": Scripted()}))
    assert [one["content"] for one in told(record)["messages"]] == ["2+", "25", "2+", "25"]
    assert record.columns["turns"][:, 3].tolist() == [0, 0], "the policy is one player"


@pytest.mark.parametrize(("player", "earned"), [("2", [0.0, 1.5]), ("1", [0.0, -0.5])])
def test_what_a_role_earns_is_named_and_in_no_turn(
    make: Make, player: str, earned: list[float]
) -> None:
    record = play(make({player: Scripted()}))
    assert told(record)["rewards"] == {"1/game": 1.0, "2/game": -1.0, "polite": 0.5}
    reward = record.columns["turn_reward"]
    turns = record.columns["turns"]
    assert [float(reward[begin:end].sum()) for begin, end, _, _ in turns] == earned


# -- what a role is asked --------------------------------------------------------------------------


def test_a_role_reads_what_its_player_was_told_and_has_said(make: Make) -> None:
    opponent = Scripted()
    play(make({"2": opponent}))
    # a policy without a chat template reads its own end token behind what it said
    assert [one.prompt.text for one in opponent.asked] == ["2+", "2+7<eos>2+"]
    assert not any(one.greedy for one in opponent.asked)


def test_a_role_is_asked_a_chat_where_the_policy_reads_chats(
    make: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = make({"2": (opponent := Scripted())})
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    play(draws)
    roles = [[one["role"] for one in asked.prompt.messages or ()] for asked in opponent.asked]
    assert roles == [["user"], ["user", "assistant", "user"]]


def test_each_turn_of_a_role_has_a_seed_of_its_own_which_is_the_same_again(make: Make) -> None:
    seeds = []
    for _ in range(2):
        opponent = Scripted()
        play(make({"2": opponent}))
        seeds.append([one.seed for one in opponent.asked])
    assert seeds[0] == seeds[1]
    assert len({1000, *seeds[0]}) == 3


def test_two_players_may_have_one_role(make: Make) -> None:
    opponent = Scripted()
    record = play(make({"1": opponent, "2": opponent}))
    assert record.status == FAILED and record.reason.startswith("no_turn")
    assert len(opponent.asked) == 4


# -- faults ----------------------------------------------------------------------------------------


def test_an_episode_whose_role_is_lost_fails_and_others_go_on(make: Make) -> None:
    answers = iter([WorkerDied("opponent.0 ended"), *[said("7")] * 2])
    draws = make({"2": Scripted(lambda question: next(answers))})
    record = play(draws)
    assert record.status == FAILED
    assert record.reason == "role_lost: opponent: WorkerDied: opponent.0 ended"
    assert play(draws).status == FINISHED


@pytest.mark.parametrize(("player", "status"), [("2", TRUNCATED), ("1", FAILED)])
def test_a_role_that_cannot_answer_ends_the_episode_as_the_policys_turn_would(
    make: Make, player: str, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the policy has said before is kept. The log says the reason once."""
    refusing = Scripted(lambda question: said("", FAILED, "prompt_too_long"))
    draws = make({player: refusing})
    for _ in range(2):
        record = play(draws)
        assert (record.status, record.reason) == (status, "role_failed: opponent: prompt_too_long")
    assert caplog.text.count("role opponent could not answer: prompt_too_long") == 1


def test_an_answer_that_was_cut_truncates_the_episode_that_it_ends(make: Make) -> None:
    record = play(make({"2": Scripted(lambda question: said("7", TRUNCATED, "length"))}))
    assert (record.status, record.reason) == (TRUNCATED, "length")
    assert told(record)["rewards"]["1/game"] == 1.0


def test_the_turns_of_roles_count_for_the_limit(make: Make) -> None:
    record = play(make({"2": Scripted()}, turns=3))
    assert (record.status, record.reason) == (TRUNCATED, "turns")


def test_a_role_may_end_an_episode_in_which_the_policy_has_said_all_that_it_may(
    make: Make,
) -> None:
    """What a role says is none of the policy's tokens."""
    record = play(make({"2": Scripted()}, max_actions=6))
    assert (record.status, record.reason) == (FINISHED, "")
    assert record.columns["action_mask"].sum() == 6
    record = play(make({"2": Scripted()}, max_actions=3))
    assert (record.status, record.reason) == (TRUNCATED, "length")


def test_an_aborted_episode_gives_up_what_its_role_owes(make: Make) -> None:
    opponent = Scripted(waits=True)
    draws = make({"2": opponent})
    draws.submit([request()])
    until(draws, lambda ended: opponent.owed)
    (record,) = draws.abort([(0, 0)])
    assert record.status == ABORTED
    assert record.columns["action_mask"].sum() == 3, "what the policy said before"
    assert opponent.owed[0].cancelled()
    assert not draws.step()


def test_close_gives_up_what_roles_owe(make: Make) -> None:
    opponent = Scripted(waits=True)
    draws = make({"1": opponent})
    draws.submit([request()])
    until(draws, lambda ended: opponent.owed)
    draws.close()
    assert opponent.owed[0].cancelled()


def test_who_waits_for_a_role_says_so_until_it_has_answered(make: Make) -> None:
    """Else an answer that takes longer than run.patience_s counts as a hang of the rollout."""
    signs: list[float] = []
    opponent = Scripted(waits=True)
    draws = make({"2": opponent}, progress=lambda: signs.append(time.monotonic()))
    draws.submit([request()])
    until(draws, lambda ended: opponent.owed)
    before = len(signs)
    until(draws, lambda ended: len(signs) > before + 2)
    draws.abort([(0, 0)])
    before = len(signs)
    for _ in range(20):
        draws.step()
    assert len(signs) == before, "nobody owes an answer any more"


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_first", [True, False])
def test_a_deterministic_run_draws_no_turn_while_a_role_owes_one(
    make: Make, late_first: bool
) -> None:
    """Which turns are drawn together does not depend on which role was quick."""
    opponent = Scripted(waits=True)
    draws = make({"1": opponent}, deterministic=True)
    engine: Any = draws._engine
    batches = []
    submit = engine.submit

    def watched(requests: list[SampleRequest]) -> None:
        batches.append(len(requests))
        submit(requests)

    engine.submit = watched
    draws.submit([request(ordinal) for ordinal in range(2)])
    until(draws, lambda ended: len(opponent.owed) == 2)
    first = int(late_first)
    opponent.answer(first)
    for _ in range(20):
        draws.step()
    assert not batches
    opponent.answer(1 - first)
    until(draws, lambda ended: batches)
    assert batches == [2]


def test_an_answer_of_an_episode_that_was_drawn_again_is_not_told(make: Make) -> None:
    opponent = Scripted(waits=True)
    draws = make({"1": opponent})
    draws.submit([request()])
    until(draws, lambda ended: opponent.owed)
    draws._replace(draws._episodes[0, 0].host, "it was lost")
    until(draws, lambda ended: len(opponent.owed) == 2)
    assert opponent.owed[0].cancelled()
    assert opponent.asked[0].seed == opponent.asked[1].seed
    np.testing.assert_array_equal(opponent.asked[0].prompt.text, opponent.asked[1].prompt.text)


# -- agents at the endpoint ------------------------------------------------------------------------

PROGRAM = "programs.py:AsksRole"
COUNTED = Answer(text="7 STOP 8", status=FINISHED, n_prompt=3, n_actions=2)


def test_a_program_asks_a_role_by_its_name(make: Make, tokenizer: Any) -> None:
    """The policy reads what the role said as anything else that it is told."""
    opponent = Scripted()
    record = play(make({"2": opponent}, PROGRAM))
    assert (record.status, record.reason) == (FINISHED, "")
    assert [one.prompt.text for one in opponent.asked] == ["25"]
    assert tokenizer.decode(record.columns["action_ids"]) == "25<eos>725<eos>"
    assert told(record)["rewards"] == {"models": 2.0, "total_tokens": 0.0, "is_named": 1.0}
    assert [one["content"] for one in told(record)["players"]["2"]] == ["25", "7"]
    assert [one["content"] for one in told(record)["messages"]] == ["1", "25", "7", "25"]


def test_a_program_learns_how_long_a_roles_answer_was_and_may_stop_it(
    make: Make, tokenizer: Any
) -> None:
    draws = make({"2": Scripted(lambda _: COUNTED)}, PROGRAM, config={"fields": {"stop": " STOP"}})
    record = play(draws)
    assert told(record)["rewards"]["total_tokens"] == 5.0
    assert tokenizer.decode(record.columns["action_ids"]) == "25<eos>725<eos>"


@pytest.mark.parametrize(
    "fields", [{"logprobs": True}, {"return_token_ids": True}, {"temperature": 0.5}, {"n": 2}]
)
def test_what_only_the_policy_can_give_is_refused_of_a_role(
    make: Make, fields: dict[str, Any]
) -> None:
    opponent = Scripted()
    record = play(make({"2": opponent}, PROGRAM, config={"fields": fields}))
    assert told(record)["rewards"] == {"refused": 400.0}
    assert not opponent.asked


def test_a_program_is_not_late_while_a_role_owes_it_an_answer(make: Make) -> None:
    opponent = Scripted(waits=True)
    draws = make({"2": opponent}, PROGRAM, deterministic=True)
    draws.submit([request()])
    until(draws, lambda ended: opponent.owed)
    assert draws._episodes[0, 0].waits_since is None
    opponent.answer(0)
    assert until(draws, len)[0].status == FINISHED


def test_a_role_that_says_nothing_is_an_error_to_the_program_that_asked(make: Make) -> None:
    refusing = Scripted(lambda question: said("", FAILED, "prompt_too_long"))
    record = play(make({"2": refusing}, PROGRAM))
    assert told(record)["rewards"] == {"refused": 400.0}
    assert (record.status, record.reason) == (TRUNCATED, "role_failed: opponent: prompt_too_long")


def test_an_episode_of_a_program_whose_role_is_lost_fails(make: Make) -> None:
    record = play(make({"2": Scripted(lambda question: WorkerDied("it ended"))}, PROGRAM))
    assert record.status == FAILED and record.reason.startswith("role_lost: opponent: ")


# -- players, and agents that never rest -----------------------------------------------------------


def test_a_player_that_never_has_a_turn_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws_module, "PLAYER_EPISODES", 2)
    draws = make({"two": Scripted()})
    draws.submit([request(ordinal) for ordinal in range(2)])
    with pytest.raises(ConfigError, match="named: 1, 2;") as caught:
        until(draws, lambda ended: len(ended) == 2)
    assert caught.value.where == "environment.roles.two"


def test_a_player_that_may_come_up_later_is_told_of_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only "2" is left to the policy, so nobody here is the judge under another name."""
    monkeypatch.setattr(draws_module, "PLAYER_EPISODES", 2)
    draws = make({"judge": Scripted(), "1": Scripted()})
    draws.submit([request(ordinal) for ordinal in range(2)])
    until(draws, lambda ended: len(ended) == 2)
    draws.submit([request(2)])
    assert draws.abort([(2, 0)])[0].status == ABORTED
    draws.submit([request(ordinal) for ordinal in range(3, 5)])
    until(draws, lambda ended: len(ended) == 2)
    assert [line for line in caplog.messages if "environment.roles.judge" in line] == [
        "environment.roles.judge: no turn of the first 2 episodes was this player's."
    ]


def test_a_program_asks_a_role_for_all_players_that_it_speaks_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draws_module, "PLAYER_EPISODES", 1)
    opponent = Scripted()
    assert play(make({"2": opponent, "3": opponent}, PROGRAM)).status == FINISHED
    assert not [line for line in caplog.messages if "environment.roles" in line]


def test_agents_that_repeat_refused_requests_do_not_keep_the_engine_from_its_turns(
    make: Make,
) -> None:
    draws = make({"2": Scripted()})
    heard = []

    class Endless:
        """Is an inbox that is never empty."""

        def get(self, timeout: float) -> Asked:
            heard.append(timeout)
            return Asked(key=(99, 0), kind="chat")  # of an episode that is over

    class Steps:
        """Is an engine that counts its steps."""

        steps = 0

        def submit(self, requests: Any) -> None:
            pass

        def step(self) -> list[Finished]:
            self.steps += 1
            return []

        def abort(self, keys: Any) -> list[Finished]:
            return []

    engine: Any = Steps()
    inbox: Any = Endless()
    draws._turns = draws_module.Turns(engine)
    draws._turns.ask([request(1 << 48)])
    draws._inbox = inbox
    for _ in range(3):
        draws.step()
    assert engine.steps == 3 and heard


# -- before a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("players", "speaking", "problem"),
    [
        (2, ["1"], ""),
        (2, ["2"], "environment.roles.2: the players of this game are 0, 1; name one of them"),
        (1, ["1"], "environment.roles.1: the players of this game have no names: it is for one"),
        (2, ["0", "1"], "environment.roles: roles speak for all players of this game"),
        (1, [""], "environment.roles: the player without a name is the policy"),
    ],
)
def test_a_role_speaks_for_some_players_that_a_game_of_textarena_has(
    players: int, speaking: list[str], problem: str
) -> None:
    config = TextArenaConfig(game="TicTacToe-v0", players=players)
    speakers = dict.fromkeys(speaking, "opponent")
    job: Any = SimpleNamespace(
        objects={"environment": config},
        provided={},
        settings=SimpleNamespace(run=RunSettings(), speakers=speakers),
    )
    found = [one for one in problems({}, job) if one.startswith("environment.roles")]
    assert [one.startswith(problem) for one in found] == ([True] if problem else [])
