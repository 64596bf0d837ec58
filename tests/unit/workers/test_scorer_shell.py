"""The scorer's shell: a failed reward is a status with a reason; a time limit counts from when the
reward begins.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gcore_testing.fake import FakeDataConfig, FakeDataset

from gcore_core.contract.errors import ConfigError, DataError, RecordMismatch
from gcore_core.contract.questions import Question
from gcore_core.contract.records import Header, Prompt, RecordScore
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.runtime.compute import ThreadCompute
from gcore_core.runtime.messages import RESTART_EXIT_CODE, AnswerItem, AskRequest, ScoreRequest
from gcore_core.store.client import StoreReader, StoreWriter
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service
from gcore_core.workers.checked_rewards import read_known
from gcore_core.workers.overruns import Overruns, RewardWork, describe_called
from gcore_core.workers.role_sampler import RoleSampler
from gcore_core.workers.row_digest import prompt_digest
from gcore_core.workers.scorer import NamedScorer, ScorerShell

SECRET = b"s" * 32


class Reward:
    def __init__(self, answer: Callable[[Sequence[ScoredRecord]], list[Score]]) -> None:
        self.score = answer


class Bench:
    """A shell around rewards, and two finished records to score."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.given_up = directory, []  # type: ignore[var-annotated]
        self.headers: list[Header] = []

    async def write(self) -> None:
        network, service = InlineNetwork(), Service("agent.0")
        spec = StoreSpec(
            node="node0", directory=str(self.directory), spill=str(self.directory / "spill")
        )
        SlabService(spec, SECRET).register(service)
        await network.view("agent.0").serve("agent.0", service)
        agent = network.view("rollout.0").peer("agent.0")
        writer = StoreWriter(self.directory, "node0", SECRET, agent, "rollout.0")
        texts = [
            np.frombuffer(text, np.uint8) for text in (b"aab", b"b\xff")
        ]  # the second is no UTF-8
        ref = await writer.put(0, frozenset({0}), [{"text": text} for text in texts])
        self.headers = [
            Header(ordinal=4, sample=s, row=s, seed=0, columns=ref, slot=s) for s in range(2)
        ]

    def shell(
        self, timeout_s: float = 60.0, **rewards: Callable[[Sequence[ScoredRecord]], list[Score]]
    ) -> ScorerShell:
        scorers = [
            NamedScorer(name=n, scorer=Reward(answer), timeout_s=timeout_s)
            for n, answer in rewards.items()
        ]
        dataset = FakeDataset(FakeDataConfig(rows=8))
        reader = StoreReader(self.directory, "node0", SECRET)
        return ScorerShell(
            scorers, {"train": dataset}, reader, ThreadCompute(), self.given_up.append
        )

    async def ask(self, shell: ScorerShell) -> list[RecordScore]:
        return await shell.score(ScoreRequest("train", self.headers), Call(lambda: None))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "store")
    await bench.write()
    yield bench


def ones(records: Sequence[ScoredRecord]) -> list[Score]:
    return [Score(value=1.0) for _ in records]


async def test_a_reward_sees_the_row_and_the_text(bench: Bench) -> None:
    seen: list[tuple[int, str, str | None]] = []

    def look(records: Sequence[ScoredRecord]) -> list[Score]:
        seen.extend((record.sample, record.text, record.prompt.text) for record in records)
        return ones(records)

    await bench.ask(bench.shell(look=look))
    assert seen == [(0, "aab", "row 0"), (1, "b\N{REPLACEMENT CHARACTER}", "row 1")]


class HeldRows:
    """Holds its prompts, and hands out what it holds; two records of a group have one row."""

    def __init__(self) -> None:
        self._prompt = Prompt(
            row=0,
            messages=[{"role": "user", "content": "?"}],
            fields={"answer": "5", "tests": [{"in": "1"}, {"in": "2"}]},
        )

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> Prompt:
        return self._prompt


@pytest.mark.parametrize("waits", [False, True])
async def test_what_a_reward_changes_of_a_row_nobody_else_sees(bench: Bench, waits: bool) -> None:
    """Neither other records, nor other rewards, nor later requests see it; coroutines alike."""
    seen: list[str] = []

    def empty(records: Sequence[ScoredRecord]) -> list[Score]:
        for record in records:
            fields, messages = record.prompt.fields, record.prompt.messages
            assert messages is not None
            seen.append(f"{fields} {messages}")
            while fields["tests"]:
                fields["tests"].pop().clear()
            fields["answer"] = "another"
            messages[0]["content"] = "another"
            messages.clear()
        return ones(records)

    async def empty_waiting(records: Sequence[ScoredRecord]) -> list[Score]:
        return empty(records)

    scorers: list[Any] = [Reward(empty), Reward(empty_waiting if waits else empty)]  # type: ignore[arg-type]
    rows = HeldRows()
    shell = ScorerShell(
        [NamedScorer(name=f"r{i}", scorer=s, timeout_s=60.0) for i, s in enumerate(scorers)],
        {"train": rows},
        StoreReader(bench.directory, "node0", SECRET),
        ThreadCompute(),
        bench.given_up.append,
    )
    digest = prompt_digest(rows[0])
    bench.headers = [
        msgspec.structs.replace(header, row=0, prompt_digest=digest) for header in bench.headers
    ]
    for _ in range(2):
        reply = await bench.ask(shell)
        assert [score.statuses for score in reply] == [{"r0": "ok", "r1": "ok"}] * 2
    assert len(seen) == 8
    assert len(set(seen)) == 1


async def test_every_reward_of_the_worker_adds_its_value(bench: Bench) -> None:
    reply = await bench.ask(bench.shell(one=ones, two=lambda records: [Score(value=2.0)] * 2))
    assert [(score.values, score.statuses) for score in reply] == [
        ({"one": 1.0, "two": 2.0}, {"one": "ok", "two": "ok"})
    ] * 2


async def test_the_reason_of_a_value_is_no_failure(bench: Bench) -> None:
    """A failure's reason stays by itself."""

    def says(records: Sequence[ScoredRecord]) -> list[Score]:
        return [
            Score(value=0.5, reason="it is one too many"),
            Score(value=None, status="failed", reason="no luck"),
        ]

    first, second = await bench.ask(bench.shell(silent=ones, says=says))
    assert (first.values, first.reason) == ({"silent": 1.0, "says": 0.5}, "")
    assert second.reason == "rewards.says: no luck"


@pytest.mark.parametrize("purpose", ["train", "greedy"])
async def test_a_row_that_is_another_one_than_the_generators_is_refused(
    purpose: str, bench: Bench
) -> None:
    section = "data" if purpose == "train" else "evaluation.data"
    dataset = FakeDataset(FakeDataConfig(rows=8))
    shell = ScorerShell(
        [NamedScorer(name="one", scorer=Reward(ones), timeout_s=60.0)],
        {"train": dataset, "evaluation": dataset},
        StoreReader(bench.directory, "node0", SECRET),
        ThreadCompute(),
        bench.given_up.append,
        providers={"train": "mine/rows", "evaluation": "mine/rows"},
    )

    def request(offset: int) -> ScoreRequest:
        digests = [prompt_digest(dataset[header.row + offset]) for header in bench.headers]
        headers = [
            msgspec.structs.replace(header, prompt_digest=digest)
            for header, digest in zip(bench.headers, digests, strict=True)
        ]
        return ScoreRequest(purpose, headers)

    assert len(await shell.score(request(0), Call(lambda: None))) == 2
    with pytest.raises(DataError, match=f"^{section}: dataset mine/rows: row 0 is another one"):
        await shell.score(request(1), Call(lambda: None))


def raises(records: Sequence[ScoredRecord]) -> list[Score]:
    raise ValueError("no luck")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raises, "rewards.bad: ValueError: no luck (test_scorer_shell.py:"),
        (lambda records: [0.5, 1.0], "score() gave a list with a float, not a Score (test_scorer_"),
        (lambda records: None, "score() gave a NoneType, not a list (test_scorer_shell.py:"),
        (lambda records: [Score(value="1")] * 2, "gave a Score whose value is a str (test_scorer_"),
        (lambda records: [Score(value=float("nan"))] * 2, "rewards.bad: the reward is nan"),
        (lambda records: [Score(value=float("inf"))] * 2, "rewards.bad: the reward is inf"),
        (
            lambda records: [Score(value=1e39)] * 2,
            "rewards.bad: the reward is 1e+39, too large for",
        ),
        (lambda records: [Score(value=-1e160)] * 2, "rewards.bad: the reward is -1e+160, too larg"),
        (lambda records: [Score(value=10**39)] * 2, "rewards.bad: the reward is 1e+39, too large "),
        (lambda records: [Score(value=None)] * 2, "rewards.bad: the reward is None"),
        (lambda records: [Score(value=1.0)], "rewards.bad: 1 scores for 2 records"),
        (
            lambda records: [Score(value=None, status="failed", reason="no boxed answer")] * 2,
            "no boxed answer",
        ),
        (
            lambda records: [Score(value=None, status="failed")] * 2,
            "rewards.bad: failed, without a reason",
        ),
    ],
    ids=[
        "raises",
        "floats",
        "nothing",
        "text",
        "nan",
        "inf",
        "float64",
        "squared",
        "int",
        "none",
        "too-few",
        "says-so",
        "mute",
    ],
)
async def test_a_failing_reward_sets_its_status_and_affects_no_other(
    answer: Callable[[Sequence[ScoredRecord]], list[Score]], reason: str, bench: Bench
) -> None:
    reply = await bench.ask(bench.shell(bad=answer, good=ones))
    for score in reply:
        assert score.values == {"good": 1.0}
        assert score.statuses == {"bad": "failed", "good": "ok"}
        assert reason in score.reason
    assert bench.given_up == []


@pytest.mark.parametrize(
    "value", [10**400, -(10**5000), Fraction(10**400)], ids=["int", "long", "fraction"]
)
async def test_a_value_that_no_float_can_hold_fails_its_record_alone(
    value: Any, bench: Bench, tmp_path: Path
) -> None:
    """The text of the second would raise, too: it has more digits than Python writes."""

    def large(records: Sequence[ScoredRecord]) -> list[Score]:
        return [Score(value=value if record.text == "aab" else 1.0) for record in records]

    shell = bench.shell(large=large)
    shell._scorers = [
        NamedScorer(name="large", scorer=Reward(large), timeout_s=60.0, alone_every=1)
    ]
    first, second = await bench.ask(shell)
    assert (first.values, first.statuses) == ({}, {"large": "failed"})
    name = type(value).__name__
    assert first.reason == f"rewards.large: the reward is a {name} too large for a float"
    assert (second.values, second.statuses) == ({"large": 1.0}, {"large": "ok"})
    known = tmp_path / "known.jsonl"
    known.write_text('{"row": {"prompt": "1+1="}, "text": "aab", "reward": 3}\n')
    shell = bench.shell()
    shell._scorers = [
        NamedScorer(name="large", scorer=Reward(large), timeout_s=60.0, known=str(known))
    ]
    with pytest.raises(RecordMismatch, match=r"the reward fails \(the reward is a .* too large"):
        await bench.ask(shell)


async def test_a_long_reason_keeps_the_line_of_the_reward(bench: Bench) -> None:
    def raises_much(records: Sequence[ScoredRecord]) -> list[Score]:
        raise ValueError("x" * 500)

    reply = await bench.ask(bench.shell(bad=raises_much))
    line = raises_much.__code__.co_firstlineno + 1
    assert reply[0].reason.startswith("rewards.bad: ValueError: xxx")
    assert reply[0].reason.endswith(f"xxx (test_scorer_shell.py:{line})")
    assert len(reply[0].reason.encode()) == 128


async def test_a_hanging_reward_times_out_and_its_process_is_abandoned(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def hang(records: Sequence[ScoredRecord]) -> list[Score]:
        release.wait()
        return ones(records)

    reply = await bench.ask(bench.shell(timeout_s=0.1, slow=hang))
    release.set()
    assert [score.statuses for score in reply] == [{"slow": "timeout"}] * 2
    assert [score.values for score in reply] == [{}] * 2
    assert reply[0].reason == "rewards.slow: no answer within 0.1 s"
    assert bench.given_up == [RESTART_EXIT_CODE]
    assert "rewards.slow.timeout_s gives it more time" in caplog.text


async def test_waiting_for_its_turn_does_not_count_against_a_reward(bench: Bench) -> None:
    """Ten requests of 0.1 s each come at once; the limit of 0.5 s is for each of them alone."""

    def slow(records: Sequence[ScoredRecord]) -> list[Score]:
        time.sleep(0.1)
        return ones(records)

    shell = bench.shell(timeout_s=0.5, slow=slow)
    replies = await asyncio.gather(*(bench.ask(shell) for _ in range(10)))
    assert {score.statuses["slow"] for reply in replies for score in reply} == {"ok"}
    assert bench.given_up == []


class Labelled(FakeDataset):
    fields: dict[str, Any] | None = None

    def __getitem__(self, row: int) -> Prompt:
        fields = self.fields or {"language": ["de", "en"][row % 2]}
        return Prompt(row=row, text="", fields=fields)


class Waits:
    """A reward that waits for something else."""

    def __init__(self, answer: Callable[[], Awaitable[None]]) -> None:
        self._answer, self.at_once = answer, 0

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        self.at_once += 1
        await self._answer()
        return ones(records)


def waiting(
    bench: Bench,
    reward: Waits,
    overruns: Overruns | None = None,
    fields: dict[str, Any] | None = None,
    **settings: object,
) -> ScorerShell:
    named = NamedScorer(name="waits", scorer=reward, **{"timeout_s": 60.0, **settings})  # type: ignore[arg-type]
    reader = StoreReader(bench.directory, "node0", SECRET)
    data = Labelled(FakeDataConfig(rows=8))
    data.fields = fields
    return ScorerShell(
        [named],
        {"train": data},
        reader,
        ThreadCompute(),
        bench.given_up.append,
        overruns,
    )


async def test_work_that_is_over_has_timed_out_and_is_not_asked_again(
    bench: Bench, tmp_path: Path
) -> None:
    async def at_once() -> None:
        pass

    overruns = Overruns(tmp_path / "note")
    reward = Waits(at_once)
    shell = waiting(bench, reward, overruns)
    first, second = (
        RewardWork("waits", "train", header.ordinal, header.sample, header.versions[1])
        for header in bench.headers
    )
    overruns.add_over([first])
    reply = await bench.ask(shell)
    assert [score.statuses["waits"] for score in reply] == ["timeout", "ok"]
    assert reply[0].reason == "rewards.waits: no answer within 60 s"
    overruns.add_over([second])
    reply = await bench.ask(shell)
    assert [score.statuses["waits"] for score in reply] == ["timeout", "timeout"]
    assert reward.at_once == 1


async def test_only_a_reward_with_a_limit_is_noted_for_the_agent(
    bench: Bench, tmp_path: Path
) -> None:
    """One that asks a role may wait as long as the role makes progress."""
    note = tmp_path / "note"
    seen: list[str] = []

    async def look() -> None:
        seen.append(describe_called(note))

    sampler = RoleSampler("judge", [], lambda: None)
    await bench.ask(waiting(bench, Waits(look), Overruns(note)))
    await bench.ask(waiting(bench, Waits(look), Overruns(note), sampler=sampler))
    assert seen == ["rewards.waits was being called, with the records 4/0, 4/1", ""]


async def test_calls_of_a_reward_that_waits_overlap(bench: Bench) -> None:
    all_here = asyncio.Event()

    async def until_all_are_here() -> None:
        if reward.at_once == 3:
            all_here.set()
        await all_here.wait()

    reward = Waits(until_all_are_here)
    shell = waiting(bench, reward)
    replies = await asyncio.gather(*(bench.ask(shell) for _ in range(3)))
    assert [[score.statuses for score in reply] for reply in replies] == [[{"waits": "ok"}] * 2] * 3


async def test_a_reward_that_awaits_too_long_is_cancelled_and_its_process_stays(
    bench: Bench,
) -> None:
    reply = await bench.ask(waiting(bench, Waits(asyncio.Event().wait), timeout_s=0.1))  # type: ignore[arg-type]
    assert [score.statuses for score in reply] == [{"waits": "timeout"}] * 2
    assert bench.given_up == []


async def test_a_timeout_that_a_reward_raises_itself_is_a_failure_like_any_other(
    bench: Bench,
) -> None:
    """That of a service which it asks, for example: nothing hangs, so the process stays."""

    def raises_timeout(records: Sequence[ScoredRecord]) -> list[Score]:
        raise TimeoutError("the service did not answer")

    async def waits_and_raises_timeout() -> None:
        raises_timeout([])

    in_turn = await bench.ask(bench.shell(own=raises_timeout))
    overlapping = await bench.ask(waiting(bench, Waits(waits_and_raises_timeout)))
    for reply, name in ((in_turn, "own"), (overlapping, "waits")):
        assert [score.statuses for score in reply] == [{name: "failed"}] * 2
        assert "TimeoutError: the service did not answer" in reply[0].reason
    assert bench.given_up == []


async def test_a_reward_scores_only_the_records_assigned_to_it(bench: Bench) -> None:
    async def at_once() -> None:
        pass

    reply = await bench.ask(waiting(bench, Waits(at_once), when={"language": ["en", "fr"]}))
    assert [score.statuses["waits"] for score in reply] == ["skipped", "ok"]
    assert [score.values for score in reply] == [{}, {"waits": 1.0}]


async def test_a_reward_is_for_rows_whose_field_says_a_value_as_json_does(bench: Bench) -> None:
    """YAML says 3 where a table says 3.0 or "3"; "007" is no number, and true is not 1."""

    async def at_once() -> None:
        pass

    for level, wanted, status in (
        (3.0, 3, "ok"),
        ("3", 3, "ok"),
        (3, "3", "ok"),
        ("007", 7, "skipped"),
        (True, 1, "skipped"),
        ("True", True, "ok"),
        (None, None, "ok"),
        ("", None, "skipped"),
    ):
        shell = waiting(bench, Waits(at_once), fields={"level": level}, when={"level": [wanted]})
        reply = await bench.ask(shell)
        assert [score.statuses["waits"] for score in reply] == [status] * 2, (level, wanted)


async def test_a_gcore_error_raised_by_a_reward_ends_the_run(bench: Bench) -> None:
    async def stops() -> None:
        raise ConfigError("nothing it said could be read", where="rewards.waits.config.parser")

    with pytest.raises(ConfigError, match="nothing it said"):
        await bench.ask(waiting(bench, Waits(stops)))


def _lengths(records: Sequence[ScoredRecord]) -> list[Score]:
    return [Score(value=float(len(record.text))) for record in records]


async def test_a_score_is_asked_for_alone_only_where_the_job_says_so(bench: Bench) -> None:
    calls: list[int] = []

    def turned(records: Sequence[ScoredRecord]) -> list[Score]:
        calls.append(len(records))
        return _lengths(records)[::-1]

    shell = bench.shell(turned=turned)
    await bench.ask(shell)
    assert calls == [2]
    shell._scorers = [
        NamedScorer(name="turned", scorer=Reward(turned), timeout_s=60.0, alone_every=1)
    ]
    with pytest.raises(RecordMismatch, match="rewards.turned: record 4/.* among others and .* al"):
        await bench.ask(shell)


async def test_a_coroutine_and_a_reward_of_groups_cannot_be_asked_alone(bench: Bench) -> None:
    async def later(records: Sequence[ScoredRecord]) -> list[Score]:
        return _lengths(records)

    class Later:
        score = staticmethod(later)

    def shell(scorer: Any, of_groups: bool) -> ScorerShell:
        reward = NamedScorer(
            name="r", scorer=scorer, timeout_s=60.0, of_groups=of_groups, alone_every=1
        )
        reader = StoreReader(bench.directory, "node0", SECRET)
        return ScorerShell([reward], {}, reader, ThreadCompute(), bench.given_up.append)

    with pytest.raises(ConfigError, match=r"rewards\.r\.alone_every: .*(?s:.*)is a coroutine"):
        shell(Later(), False)
    with pytest.raises(ConfigError, match=r"rewards\.r\.alone_every: .*(?s:.*)records of a prompt"):
        shell(Reward(_lengths), True)
    shell(Reward(_lengths), False)


async def test_a_known_reward_that_is_given_otherwise_ends_the_run(
    bench: Bench, tmp_path: Path
) -> None:
    known = tmp_path / "known.jsonl"
    known.write_text(
        '{"row": {"prompt": "1+1="}, "text": "abc", "reward": 3}\n\n'
        '{"row": {"prompt": "1+1="}, "text": "abcd", "reward": 4}\n'
    )
    asked: list[str] = []

    def swallows(records: Sequence[ScoredRecord]) -> list[Score]:
        asked.extend(record.text for record in records)
        return [Score(value=0.0 if record.text == "abcd" else 3.0) for record in records]

    def shell(answer: Callable[[Sequence[ScoredRecord]], list[Score]]) -> ScorerShell:
        made = bench.shell(r=answer)
        made._scorers = [
            NamedScorer(name="r", scorer=Reward(answer), timeout_s=60.0, known=str(known))
        ]
        return made

    with pytest.raises(RecordMismatch, match="gives 0 for an answer whose reward is known to be 4"):
        await bench.ask(shell(swallows))
    assert asked == ["abc", "abcd"]
    right = shell(_lengths)
    assert [score.values for score in await bench.ask(right)] == [{"r": 3.0}, {"r": 2.0}]
    known.write_text('{"row": {"prompt": "1+1="}, "text": "a\u2028c", "reward": 4}\n')
    with pytest.raises(RecordMismatch, match="gives 1 for an answer"):  # numpy has truth values
        await bench.ask(shell(lambda records: [Score(value=np.bool_(True)) for _ in records]))  # type: ignore[arg-type]
    known.write_text('{"text": "abc"}\n')
    with pytest.raises(ConfigError, match="rewards.r.known: .* has no known rewards: KeyError"):
        await bench.ask(shell(_lengths))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("\n", "it has no rows, so nothing would be checked"),
        ('{"row": {"prompt": "1+1="}, "text": "2", "reward": NaN}', "line 1: the reward is nan"),
        ('{"row": {}, "text": "2", "reward": 1' + "0" * 309 + "}", "OverflowError: int too large"),
        (
            '{"row": {}, "text": "2", "reward": 1' + "0" * 5000 + "}",
            "ValueError: Exceeds the limit",
        ),
        ('{"row": {}, "text": "2", "reward": -1e39}', "line 1: the reward is -1e.39, too large"),
    ],
    ids=["no-rows", "nan", "int", "long-int", "float64"],
)
def test_a_file_of_known_rewards_that_checks_nothing_is_refused(
    content: str, why: str, tmp_path: Path
) -> None:
    known = tmp_path / "known.jsonl"
    known.write_text(content)
    with pytest.raises(ConfigError, match=why):
        read_known(str(known), "exact")


class Judge:
    """A replica of a role that answers every question with one token."""

    name = "judge.0"

    async def stream(
        self, endpoint: Any, request: AskRequest, **_: Any
    ) -> AsyncGenerator[list[AnswerItem], None]:
        for question in request.questions:
            yield [AnswerItem(question.index, 0, "yes", "finished", "", 1, 1)]


async def test_answers_about_known_rows_are_measured_for_no_record(
    bench: Bench, tmp_path: Path
) -> None:
    """Nobody asks for them: in a long run they would fill the scorer's memory."""
    known = tmp_path / "known.jsonl"
    known.write_text('{"row": {"prompt": "1+1="}, "text": "2", "reward": 1}\n')
    judge: Any = Judge()
    sampler = RoleSampler("judge", [judge], lambda: None)

    class Asks:
        async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            questions = [
                Question(prompt=record.prompt, seed=0, about=(record.ordinal, record.sample))
                for record in records
            ]
            await sampler.sample(questions)
            return ones(records)

    shell = bench.shell()
    shell._scorers = [
        NamedScorer(name="r", scorer=Asks(), timeout_s=60.0, known=str(known), sampler=sampler)
    ]
    reply = await bench.ask(shell)
    assert [len(score.asked) for score in reply] == [1, 1]
    assert not sampler._inquiries


async def test_an_answer_about_no_record_is_not_measured() -> None:
    judge: Any = Judge()
    sampler = RoleSampler("judge", [judge], lambda: None)
    await sampler.sample([Question(prompt=Prompt(row=0, text="?"), seed=0)])
    assert not sampler._inquiries
