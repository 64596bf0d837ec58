"""Episodes from the request to the record: turns, limits, faults of environments, and agents.

The engine is scripted. Environments run in real processes, in troubled.py and programs.py beside
this file.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gcore_environments import sandbox
from gcore_environments.draws import EpisodeDraws
from gcore_environments.scripted import LOGP, ScriptedEngine
from gcore_environments.settings import EnvironmentConfig

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, WorkerError
from gcore_core.contract.factories import import_file
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.order import FIRST_QUESTION
from gcore_core.contract.records import ABORTED, FAILED, FINISHED, TRUNCATED, Prompt

HERE = Path(__file__).parent
PATIENCE_S = 60.0
#: Of the quickstart's tokenizer, one token a character.
END = 2

Make = Callable[..., EpisodeDraws]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    task = import_file(HERE.parents[2] / "recipes" / "quickstart" / "arithmetic.py")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=task._tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Iterator[Make]:
    """Makes draws whose environment is a class beside this file. All end with the test, and leave
    no process.
    """
    made: list[EpisodeDraws] = []

    def draws(
        environment: str = "troubled.py:Troubled",
        says: Callable[[str], str] = lambda text: "25",
        *,
        deterministic: bool = False,
        max_actions: int = 4096,
        context_length: int = 0,
        settings: Mapping[str, Any] = {},
        narrowed: Mapping[str, Any] = {},
        **config: Any,
    ) -> EpisodeDraws:
        engine = ScriptedEngine(
            tokenizer, says, max_actions=max_actions, context_length=context_length, **narrowed
        )
        place = environment if environment.startswith("/") else f"{HERE}/{environment}"
        settings = {"directory": str(tmp_path), **settings}
        made.append(
            EpisodeDraws(
                EnvironmentConfig(environment=place, config=settings, **{"turn_s": 20.0, **config}),
                WorkerContext(role="rollout", deterministic=deterministic, directory=str(tmp_path)),
                engine,
            )
        )
        return made[-1]

    yield draws
    for one in made:
        one.close()
    until_s = time.monotonic() + 10
    while left := [pid for pid in _pids(tmp_path) if _runs(pid)]:
        assert time.monotonic() < until_s, f"processes {left} are left"
        time.sleep(0.02)


def _pids(directory: Path) -> list[int]:
    return [int(mark.suffix[1:]) for mark in directory.glob("pid.*")]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def request(ordinal: int, does: str = "", sample: int = 0, **fields: Any) -> SampleRequest:
    return SampleRequest(
        ordinal=ordinal,
        sample=sample,
        seed=1000 + ordinal,
        prompt=Prompt(row=ordinal, text="1+1=", fields={"does": does}),
        **fields,
    )


def play(draws: EpisodeDraws, requests: Sequence[SampleRequest]) -> dict[int, Finished]:
    """Returns the record of each ordinal."""
    draws.submit(requests)
    return wait(draws, len(requests))


def wait(draws: EpisodeDraws, count: int) -> dict[int, Finished]:
    ended: dict[int, Finished] = {}
    until_s = time.monotonic() + PATIENCE_S
    while len(ended) < count:
        assert time.monotonic() < until_s, f"only {sorted(ended)} have ended"
        for one in draws.step():
            assert one.request.ordinal not in ended, "a record came twice"
            ended[one.request.ordinal] = one
    return ended


def told(record: Finished) -> dict[str, Any]:
    return dict(json.loads(record.columns["episode"].tobytes()))


# -- a record --------------------------------------------------------------------------------------


def test_a_record_has_all_that_was_read_and_said(make: Make, tokenizer: Any) -> None:
    (record,) = play(make(), [request(0)]).values()
    assert (record.status, record.reason) == (FINISHED, "")
    columns = record.columns
    assert tokenizer.decode(columns["prompt_ids"]) == "<bos>1+1="
    assert tokenizer.decode(columns["action_ids"]) == "25<eos>+25<eos>"
    assert columns["action_mask"].tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert columns["logp"].tolist() == [LOGP, LOGP, LOGP, 0, LOGP, LOGP, LOGP]
    assert columns["turn_reward"].tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert columns["text"].tobytes() == b"2525"
    assert told(record)["rewards"] == {"word": 2.0}
    assert [m["role"] for m in told(record)["messages"]] == ["user", "assistant"] * 2


def test_each_turn_reads_all_before_it_and_has_a_seed_of_its_own(make: Make) -> None:
    seeds, texts = [], []

    def says(text: str) -> str:
        texts.append(text)
        return "25"

    draws = make(says=says, settings={"turns": 3})
    engine: Any = draws._engine
    submit = engine.submit

    def watched(requests: Sequence[SampleRequest]) -> None:
        seeds.extend(one.seed for one in requests)
        submit(requests)

    engine.submit = watched
    play(draws, [request(0)])
    assert texts == ["<bos>1+1=", "<bos>1+1=25<eos>+", "<bos>1+1=25<eos>+25<eos>+"]
    assert seeds[0] == 1000 and len(set(seeds)) == 3


def test_an_evaluation_has_negative_ordinals_and_is_greedy(make: Make) -> None:
    draws = make()
    greedy = []
    engine: Any = draws._engine
    submit = engine.submit

    def watched(requests: Sequence[SampleRequest]) -> None:
        greedy.extend(one.greedy for one in requests)
        submit(requests)

    engine.submit = watched
    records = play(draws, [request(-1, greedy=True), request(-2, greedy=True)])
    assert {one.status for one in records.values()} == {FINISHED}
    assert greedy == [True] * 4
    assert {float(one.columns["temperature"]) for one in records.values()} == {1.0}


def test_the_question_of_a_reward_goes_to_the_engine_as_it_is(make: Make) -> None:
    draws = make(says=lambda text: "y" if text == "<bos>1+1=" else "25")
    records = play(draws, [request(FIRST_QUESTION), request(0)])
    answer = records[FIRST_QUESTION]
    assert answer.columns["text"].tobytes() == b"y"
    assert "episode" not in answer.columns
    assert "episode" in records[0].columns


# -- limits ----------------------------------------------------------------------------------------


def test_an_episode_that_needs_more_turns_is_truncated(make: Make) -> None:
    (record,) = play(make(turns=3, settings={"turns": 9}), [request(0)]).values()
    assert (record.status, record.reason) == (TRUNCATED, "turns")
    assert told(record)["turns"] == 3
    assert told(record)["rewards"] == {"word": 3.0}, "the last turn is rewarded too"
    assert record.columns["action_mask"][-1] == 1, "nothing is given behind the last turn"


def test_an_episode_has_as_many_tokens_as_an_answer(make: Make) -> None:
    (record,) = play(make(max_actions=8, settings={"turns": 9}), [request(0)]).values()
    assert (record.status, record.reason) == (TRUNCATED, "length")
    assert record.columns["action_mask"].sum() == 8


def test_an_episode_ends_where_the_context_is_full(make: Make) -> None:
    (record,) = play(make(context_length=12, settings={"turns": 9}), [request(0)]).values()
    assert (record.status, record.reason) == (TRUNCATED, "context")
    ids = record.columns["prompt_ids"].size + record.columns["action_ids"].size
    assert ids <= 12


def test_a_prompt_that_fills_the_context_fails(make: Make) -> None:
    (record,) = play(make(context_length=5), [request(0)]).values()
    assert record.status == FAILED
    assert record.reason == "context: it was over before the policy had said anything"


TOOLS = """
from gcore_environments import Tools

class Adder(Tools):
    def __init__(self, directory):
        super().__init__()

    def add(self, a: int, b: int) -> int:
        return a + b

    def rewards(self, reply):
        return {"said": 1.0}
"""
PLAIN = "{% for one in messages %}{{ one.content }}{% endfor %}"


@pytest.mark.parametrize(("end", "is_told"), [("", False), ("{% if tools %}={% endif %}", True)])
def test_a_template_that_writes_no_tools_is_told_of_once(
    make: Make,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
    is_told: bool,
) -> None:
    """The policy would never call one, and nobody would know why."""
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN + end)
    (tmp_path / "adder.py").write_text(TOOLS)
    draws = make(f"{tmp_path}/adder.py:Adder")
    records = play(draws, [request(0), request(1)])
    assert {record.status for record in records.values()} == {FINISHED}
    warnings = [text for text in caplog.messages if "does not write tools" in text]
    assert len(warnings) == (0 if is_told else 1)


def test_a_turn_has_its_own_limit_and_the_environment_hears_of_it(make: Make) -> None:
    """An episode that is done, but whose last turn was cut, is truncated."""
    (record,) = play(make(turn_tokens=2), [request(0)]).values()
    assert record.columns["action_mask"].tolist() == [1, 1, 0, 1, 1]
    assert (record.status, record.reason) == (TRUNCATED, "length")


def test_an_episode_ends_when_its_time_is_over_with_what_was_said(make: Make) -> None:
    """Its time begins when its process is ready: imports may take longer."""
    draws = make(episode_s=0.5, settings={"turns": 2})
    records = play(draws, [request(0, "awaits"), request(1)])
    assert (records[0].status, records[0].reason) == (TRUNCATED, "time")
    assert records[0].columns["action_mask"].tolist() == [1, 1, 1]
    assert records[1].status == FINISHED


# -- faults of environments ------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("loops", "environment_hung: it ran for 1 s without an await"),
        ("awaits", "environment_hung: it awaited for 1 s"),
        ("raises", "environment_error: step: ValueError: no such move"),
    ],
)
def test_the_guilty_episode_fails_alone(
    make: Make, does: str, reason: str, deterministic: bool
) -> None:
    """Those that share its process are drawn again where that is killed, and end well."""
    draws = make(turn_s=1.0, deterministic=deterministic)
    records = play(draws, [request(number, does if number == 3 else "") for number in range(8)])
    assert records[3].status == FAILED
    assert records[3].reason.startswith(reason)
    assert not records[3].columns
    others = [record for number, record in records.items() if number != 3]
    assert {record.status for record in others} == {FINISHED}
    assert len({record.columns["action_ids"].tobytes() for record in others}) == 1


def test_a_host_that_dies_is_replaced_and_its_episodes_are_drawn_again(
    make: Make, tmp_path: Path
) -> None:
    draws = make(hosts=2)
    does = {0: "dies_once"}
    records = play(draws, [request(number, does.get(number, "")) for number in range(6)])
    assert {record.status for record in records.values()} == {FINISHED}
    assert len(_pids(tmp_path)) == 3


def test_who_kills_its_process_each_time_fails_in_the_end(make: Make) -> None:
    """Nobody is known to be guilty: who shares its process each time is suspected with it."""
    records = play(make(hosts=2, retries=1), [request(0, "dies"), request(1)])
    assert records[0].status == FAILED
    assert records[0].reason.startswith("environment_lost: ")
    assert records[1].status == FINISHED


def test_prints_of_an_environment_are_no_messages(make: Make) -> None:
    (record,) = play(make(), [request(0, "prints")]).values()
    assert record.status == FINISHED
    assert told(record)["turns"] == 2


def test_an_environment_that_never_starts_is_an_error_that_says_why(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    draws = make(f"{tmp_path}/broken.py:Broken", retries=1)
    with pytest.raises(WorkerError, match="does not start") as raised:
        play(draws, [request(0)])
    assert "no_such_module_at_all" in str(raised.value)
    assert draws._hosts.restarts == 0  # the next one would not start, either


def test_a_process_that_ends_at_its_first_import_is_started_again(
    make: Make, tmp_path: Path
) -> None:
    code = (
        "import os\n"
        "from pathlib import Path\n"
        f"mark = Path({str(tmp_path / 'began')!r})\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os._exit(3)\n"
    )
    text = (HERE / "troubled.py").read_text().replace("import asyncio\n", f"{code}import asyncio\n")
    (tmp_path / "once.py").write_text(text.replace("from __future__ import annotations\n", ""))
    (record,) = play(make(f"{tmp_path}/once.py:Troubled"), [request(0)]).values()
    assert record.status == FINISHED


def test_a_reward_that_is_no_number_fails_its_episode(make: Make) -> None:
    records = play(make(), [request(0, "infinite"), request(1)])
    assert "reward 'word' must be finite, is inf" in records[0].reason
    assert records[1].status == FINISHED


# -- programs, which ask by the endpoint -----------------------------------------------------------

PROGRAM = "programs.py:Asks"


def test_a_program_asks_and_its_turns_are_one_sequence(make: Make, tokenizer: Any) -> None:
    (record,) = play(make(PROGRAM, settings={"times": 3}), [request(0)]).values()
    assert (record.status, record.reason) == (FINISHED, "")
    assert tokenizer.decode(record.columns["action_ids"]) == "25<eos>+25<eos>+25<eos>"
    assert record.columns["action_mask"].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert told(record)["rewards"] == {"asked": 3.0}
    assert record.columns["turn_reward"].tolist() == [0] * 10 + [3.0]
    assert told(record)["forks"] == {}


@pytest.mark.parametrize("confine", [False, True])
def test_a_confined_agent_asks_the_policy_and_reaches_nothing_else(
    make: Make, confine: bool
) -> None:
    """Also where its process is lost and another one takes its place."""
    if confine and (why := sandbox.problem("confine")):
        pytest.skip(why)
    with socket.create_server(("127.0.0.1", 0)) as machine:
        draws = make(
            "programs.py:Curious",
            settings={"port": machine.getsockname()[1]},
            sandbox="confine" if confine else "none",
            retries=1,
        )
        (lost,) = play(draws, [request(0, "dies")]).values()
        records = play(draws, [request(number) for number in range(1, 4)])
    assert lost.reason.startswith("environment_lost: ")
    rewards = [told(record)["rewards"] for record in records.values()]
    assert rewards == [{"asked": 1.0, "reached": float(not confine)}] * 3


def test_calls_from_one_point_are_sequences_that_share_it(make: Make) -> None:
    (record,) = play(make(PROGRAM, settings={"together": 3}), [request(0)]).values()
    assert record.status == FINISHED
    assert told(record)["forks"] == {"parallel": 2}
    assert record.columns["sequences"].shape == (3, 3)
    assert record.columns["action_mask"].sum() == 4 * 3
    assert record.cost == 2 * 4  # ids that trainers read again: the prompt but for its last one


def test_a_rewritten_history_forks_or_fails_as_the_settings_say(make: Make) -> None:
    forked, refused = (
        play(make(PROGRAM, drift=drift, settings={"rewrites": True}), [request(0)])[0]
        for drift in ("fork", "error")
    )
    assert (forked.status, told(forked)["forks"]) == (FINISHED, {"rewritten": 1})
    assert refused.status == FAILED
    assert "409" in refused.reason


def test_an_agent_may_repeat_how_the_engine_samples_and_ask_for_nothing_else(make: Make) -> None:
    engine = {"top_p": 0.9, "top_k": 20}
    for asked in (engine, {}, {"temperature": 1.0}):
        draws = make(PROGRAM, narrowed=engine, settings={"sampling": asked})
        assert play(draws, [request(0)])[0].status == FINISHED
    for asked in ({"top_p": 1.0}, {"top_k": 0}, {"temperature": 0.5}):
        draws = make(PROGRAM, narrowed=engine, settings={"sampling": asked})
        (record,) = play(draws, [request(0)]).values()
        assert record.status == FAILED
        assert "400" in record.reason


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_program_that_is_refused_a_turn_is_truncated(make: Make, gives_up: bool) -> None:
    """Whether it raises or returns: its rewards count where it returns some."""
    draws = make(PROGRAM, turns=2, settings={"times": 5, "gives_up": gives_up})
    (record,) = play(draws, [request(0)]).values()
    assert (record.status, record.reason) == (TRUNCATED, "turns")
    assert told(record)["turns"] == 2
    assert told(record)["rewards"] == ({"gave_up": 0.5} if gives_up else {})


def test_programs_of_a_deterministic_run_have_their_turns_together(make: Make) -> None:
    records = play(make(PROGRAM, deterministic=True, hosts=2), [request(n) for n in range(5)])
    assert {record.status for record in records.values()} == {FINISHED}


PROMPTS = """
import asyncio
import json
import urllib.error
import urllib.request


class Prompts:
    def __init__(self, directory):
        pass

    async def run(self, row, seed, endpoint):
        prompts = ([5, 10**6], [5, 6])
        found = [await asyncio.to_thread(ask, endpoint, ids) for ids in prompts]
        return {str(n): float(status) for n, status in enumerate(found)}


def ask(endpoint, ids):
    request = urllib.request.Request(
        endpoint.base_url.removesuffix("/v1") + "/inference/v1/generate",
        json.dumps({"token_ids": ids}).encode(),
        {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
"""


def test_an_id_that_the_model_lacks_is_refused_before_an_engine_reads_it(
    make: Make, tmp_path: Path
) -> None:
    """An engine on a GPU would end with all that it draws."""
    (tmp_path / "prompts.py").write_text(PROMPTS)
    (record,) = play(make(f"{tmp_path}/prompts.py:Prompts"), [request(0)]).values()
    assert told(record)["rewards"] == {"0": 400.0, "1": 200.0}


def test_many_programs_ask_at_a_time(make: Make) -> None:
    records = play(make(PROGRAM, hosts=2, settings={"times": 3}), [request(n) for n in range(40)])
    assert {record.status for record in records.values()} == {FINISHED}
    assert {record.columns["action_mask"].sum() for record in records.values()} == {9}


# -- aborts ----------------------------------------------------------------------------------------


def test_an_abort_gives_what_was_said_or_nothing(make: Make) -> None:
    draws = make()
    draws.submit([request(0, "awaits"), request(1)])
    until_s = time.monotonic() + PATIENCE_S
    ended: list[Finished] = []
    while not ended:
        assert time.monotonic() < until_s
        ended = draws.step()
    draws.submit([request(2)])
    aborted = {one.request.ordinal: one for one in draws.abort([(0, 0), (2, 0), (99, 0)])}
    assert {one.status for one in aborted.values()} == {ABORTED} and set(aborted) == {0, 2}
    assert aborted[0].columns["action_mask"].tolist() == [1, 1, 1]
    assert aborted[2].columns["action_ids"].size == 0
    assert {"prompt_ids", "logp", "temperature", "text"} <= set(aborted[2].columns)
    again = play(draws, [request(2), request(0)])  # the same names, drawn again
    assert {one.status for one in again.values()} == {FINISHED}


def test_an_abort_returns_what_has_ended_meanwhile_as_it_ended(make: Make) -> None:
    draws = make()
    draws.submit([request(0, "raises"), request(1, "raises")])
    until_s = time.monotonic() + PATIENCE_S
    while len(draws._records) < 2:  # both have ended, and no step has returned them
        assert time.monotonic() < until_s
        draws._hear()
        for turn, finished in draws._turns.step()[0]:
            draws._policy_spoke(turn, finished)
    (aborted,) = draws.abort([(0, 0)])
    assert (aborted.request.ordinal, aborted.status) == (0, FAILED)
    assert [one.request.ordinal for one in draws.step()] == [1]


# -- deterministic runs ----------------------------------------------------------------------------


def test_the_engine_rests_while_an_environment_owes_an_answer(make: Make) -> None:
    """So that what it draws together does not depend on who was quick."""
    batches = []

    def batches_of(slow: float) -> list[int]:
        draws = make(deterministic=True, hosts=3, settings={"slow": slow, "turns": 3})
        engine: Any = draws._engine
        submit = engine.submit
        sizes: list[int] = []

        def watched(requests: Sequence[SampleRequest]) -> None:
            sizes.append(len(requests))
            submit(requests)

        engine.submit = watched
        play(draws, [request(number) for number in range(7)])
        return sizes

    for slow in (0.0, 0.05):
        batches.append(batches_of(slow))
    assert batches == [[7, 7, 7]] * 2


def test_records_of_a_deterministic_run_do_not_say_how_long_it_took(make: Make) -> None:
    (record,) = play(make(deterministic=True), [request(0)]).values()
    assert "time" not in told(record)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"environment": "games.py"}, "environment"),
        ({"environment": "games.py:no name"}, "environment"),
        ({"hosts": 0}, "hosts"),
        ({"turns": 0}, "turns"),
        ({"turn_tokens": -1}, "turn_tokens"),
        ({"turn_s": 0.0}, "turn_s"),
        ({"start_s": 0.0}, "start_s"),
        ({"drift": "ignore"}, "drift"),
        ({"history": "template"}, "history"),
        ({"sandbox": "vm"}, "sandbox"),
    ],
)
def test_settings_that_mean_nothing_are_errors(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EnvironmentConfig(**{"environment": "games.py:Maze", **settings})
    assert raised.value.where == where
