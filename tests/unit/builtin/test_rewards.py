from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from gcore_core.builtin.config import FunctionRewardConfig
from gcore_core.builtin.function_reward import FunctionScorer
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord, Scorer

CONTEXT = WorkerContext(role="scorer")
Make = Callable[..., FunctionScorer]


def record(text: str = "", sample: int = 0, **fields: Any) -> ScoredRecord:
    prompt = Prompt(row=5, text="?", fields=fields)
    return ScoredRecord(
        ordinal=1, sample=sample, prompt=prompt, text=text, status="finished", columns={}
    )


@pytest.fixture
def scorer(tmp_path: Path) -> Make:
    """A scorer of the function ``f`` in a file with the given source."""

    def make(source: str, name: str = "f", batch: bool = False) -> FunctionScorer:
        file = tmp_path / "my_rewards.py"
        file.write_text(source)
        return FunctionScorer(FunctionRewardConfig(path=str(file), name=name, batch=batch), CONTEXT)

    return make


def reasons(scores: list[Score]) -> list[str]:
    """Of scores that all failed; none of them may carry a number."""
    assert all(score.value is None and score.status == "failed" for score in scores)
    return [score.reason for score in scores]


def test_a_function_scores_each_record(scorer: Make) -> None:
    scorer_ = scorer("def f(record):\n    return len(record.text) + record.prompt.fields['plus']\n")
    assert isinstance(scorer_, Scorer)
    assert scorer_.score([record("ab", plus=0.5), record("", plus=0)]) == [
        Score(value=2.5),
        Score(value=0.0),
    ]
    assert scorer_.score([]) == []


def test_the_batch_form_sees_all_records_at_once(scorer: Make) -> None:
    assert (
        scorer("def f(records):\n    return [len(records)] * len(records)\n", batch=True).score(
            [record(), record()]
        )
        == [Score(value=2.0)] * 2
    )


@pytest.mark.parametrize(
    "returned", ["True", "1", "1.0", "np.float32(1)", "np.int64(1)", "np.bool_(True)"]
)
@pytest.mark.parametrize("batch", [False, True])
def test_every_kind_of_number_counts(scorer: Make, returned: str, batch: bool) -> None:
    value = f"[{returned}]" if batch else returned
    assert scorer(f"import numpy as np\ndef f(r):\n    return {value}\n", batch=batch).score(
        [record()]
    ) == [Score(value=1.0)]


def test_an_array_is_a_list_of_numbers(scorer: Make) -> None:
    made = scorer(
        "import numpy as np\ndef f(records):\n    return np.array([0.5, 1.0])\n", batch=True
    )
    assert made.score([record(), record()]) == [Score(value=0.5), Score(value=1.0)]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("float('nan')", "f returned nan"),
        ("float('-inf')", "f returned -inf"),
        ("10 ** 400", "f returned inf"),
        ("None", "f returned NoneType, not a number"),
        ("'1.0'", "f returned str, not a number"),
        ("1j", "f returned complex, not a number"),
        ("b'1'", "f returned bytes, not a number"),
        ("__import__('decimal').Decimal(1)", "f returned Decimal, not a number"),
        ("__import__('datetime').timedelta(1)", "f returned timedelta, not a number"),
    ],
)
def test_a_value_that_is_no_finite_number_is_a_failure(
    scorer: Make, returned: str, reason: str
) -> None:
    assert reasons(scorer(f"def f(record):\n    return {returned}\n").score([record()])) == [reason]


def test_an_exception_fails_its_record_alone_and_names_the_line(scorer: Make) -> None:
    source = (
        "def f(record):\n    return inner(record.text)\n\ndef inner(text):\n    return int(text)\n"
    )
    good, bad, last = scorer(source).score([record("1"), record("x"), record("3")])
    assert (good, last) == (Score(value=1.0), Score(value=3.0))
    assert reasons([bad]) == [
        "ValueError: invalid literal for int() with base 10: 'x' (my_rewards.py:5)"
    ]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_exits_fails_its_records(scorer: Make, kind: str, batch: bool) -> None:
    """As argparse does for words that it does not know; the worker goes on."""
    made = scorer(f"{kind} f(record):\n    raise SystemExit(2)\n", batch=batch)
    told: list[Score] = []
    thread = threading.Thread(target=lambda: told.extend(made.score([record()])), daemon=True)
    thread.start()
    thread.join(30)
    assert reasons(told) == ["SystemExit: 2 (my_rewards.py:2)"]


def test_an_exception_in_a_library_names_the_line_of_the_file(scorer: Make) -> None:
    source = "import json\ndef f(record):\n\n    return json.loads(record.text)\n"
    assert reasons(scorer(source).score([record("{")]))[0].endswith("(my_rewards.py:4)")


def test_a_syntax_error_in_a_completion_names_the_line_of_the_file(scorer: Make) -> None:
    source = "import ast\ndef f(record):\n\n    return ast.literal_eval(record.text)\n"
    assert reasons(scorer(source).score([record("1 +")]))[0].endswith("(my_rewards.py:4)")


def test_an_exception_in_the_batch_form_fails_all_its_records(scorer: Make) -> None:
    made = scorer("def f(records):\n    raise KeyError('x')\n", batch=True)
    assert reasons(made.score([record(), record()])) == ["KeyError: 'x' (my_rewards.py:2)"] * 2


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("[1.0]", "f returned 1 values for 2 records"),
        ("[]", "f returned 0 values for 2 records"),
        ("1.0", "f returned float, not a list"),
        ("__import__('numpy').array(1.0)", "f returned float, not a list"),
        ("None", "f returned NoneType, not a list"),
    ],
)
def test_a_batch_result_of_another_length_fails_all(
    scorer: Make, returned: str, reason: str
) -> None:
    made = scorer(f"def f(records):\n    return {returned}\n", batch=True)
    assert reasons(made.score([record(), record()])) == [reason] * 2


def test_one_bad_value_of_a_batch_fails_its_record_alone(scorer: Make) -> None:
    good, bad = scorer("def f(records):\n    return [1, float('nan')]\n", batch=True).score(
        [record(), record()]
    )
    assert good == Score(value=1.0) and reasons([bad]) == ["f returned nan"]


def test_async_records_are_scored_concurrently(scorer: Make) -> None:
    """The barrier opens only when all three calls wait at it: one after the other they would never
    end.
    """
    source = (
        "import asyncio\nbarrier = None\n"
        "async def f(record):\n"
        "    global barrier\n"
        "    barrier = barrier or asyncio.Barrier(3)\n"
        "    async with asyncio.timeout(20):\n"
        "        await barrier.wait()\n"
        "    return record.sample\n"
    )
    made = scorer(source)
    expected = [Score(value=float(sample)) for sample in range(3)]
    assert made.score([record(sample=sample) for sample in range(3)]) == expected
    # the loop outlives a call: the barrier is bound to it
    assert made.score([record(sample=sample) for sample in range(3)]) == expected
    made.close()


def test_an_async_exception_fails_its_record_alone(scorer: Make) -> None:
    source = (
        "import asyncio\n"
        "async def f(record):\n"
        "    if record.sample == 0:\n"
        "        raise ValueError('no')\n"
        "    if record.sample == 1:\n"
        "        raise asyncio.CancelledError\n"
        "    return 1\n"
    )
    *bad, good = scorer(source).score([record(sample=sample) for sample in range(3)])
    assert reasons(bad) == ["ValueError: no (my_rewards.py:4)", "CancelledError"]
    assert good == Score(value=1.0)


def test_an_async_function_with_other_parameters_is_a_failure(scorer: Make) -> None:
    (reason,) = reasons(scorer("async def f():\n    return 1\n").score([record()]))
    assert "takes 0 positional arguments" in reason


def test_an_async_batch_function_works(scorer: Make) -> None:
    made = scorer("async def f(records):\n    return [0.5] * len(records)\n", batch=True)
    assert made.score([record(), record()]) == [Score(value=0.5)] * 2


def test_an_async_function_runs_in_the_thread_that_calls_and_may_set_handlers(
    scorer: Make,
) -> None:
    source = (
        "import asyncio, signal\n"
        "async def f(record):\n"
        "    rung = asyncio.Event()\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.add_signal_handler(signal.SIGALRM, rung.set)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "    await rung.wait()\n"
        "    return float(loop.remove_signal_handler(signal.SIGALRM))\n"
    )
    made = scorer(source)
    assert [made.score([record()]) for _ in range(2)] == [[Score(value=1.0)]] * 2
    made.close()


def test_what_an_async_call_was_about_to_do_does_not_go_on_in_the_next(scorer: Make) -> None:
    """A handler that raises while the loop waits leaves the calls of all records half done."""
    source = (
        "import asyncio, signal\n"
        "from pathlib import Path\n"
        "def ring(number, frame):\n"
        "    raise TimeoutError('rung')\n"
        "async def f(record):\n"
        "    if record.text == 'waits':\n"
        "        signal.signal(signal.SIGALRM, ring)\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "        await asyncio.sleep(60)\n"
        "    return float(len(asyncio.all_tasks()))\n"
    )
    made = scorer(source)
    before = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(TimeoutError, match="rung"):
            made.score([record("waits")])
        alone = made.score([record()])
    finally:
        signal.signal(signal.SIGALRM, before)
        made.close()
    assert alone == scorer(source, name="f").score([record()])


def test_a_forgotten_await_is_a_failure(scorer: Make) -> None:
    source = "async def g(record):\n    return 1\n\ndef f(record):\n    return g(record)\n"
    assert reasons(scorer(source).score([record()])) == ["f returned coroutine, not a number"]


def test_a_missing_file_suggests_its_neighbour(scorer: Make, tmp_path: Path) -> None:
    scorer("def f(record): ...\n")
    with pytest.raises(
        ConfigError, match=r"my_reward\.py: no such file \(did you mean 'my_rewards.py'\?\)"
    ):
        FunctionScorer(FunctionRewardConfig(path=str(tmp_path / "my_reward.py"), name="f"), CONTEXT)


def test_error_for_a_missing_function_lists_existing_functions(scorer: Make) -> None:
    with pytest.raises(ConfigError) as error:
        scorer("def exact(record): ...\ndef other(record): ...\n", name="exakt")
    assert "has no function 'exakt' (did you mean 'exact'?)" in str(error.value)
    assert "its functions: exact, other" in str(error.value)


def test_an_attribute_that_cannot_be_called_is_refused(scorer: Make) -> None:
    with pytest.raises(ConfigError, match="f is a int, not a function"):
        scorer("f = 3\n")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("x = 1\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\nraise SystemExit(3)\n", "SystemExit: 3"),
        ("x = 1\ndef f(:\n", "SyntaxError"),
    ],
)
def test_a_file_that_does_not_import_is_named_with_its_line(
    scorer: Make, source: str, what: str
) -> None:
    with pytest.raises(DataError) as error:
        scorer(source)
    assert "my_rewards.py:2: does not import: " in str(error.value) and what in str(error.value)


def test_the_config_comes_from_yaml_and_from_the_wire() -> None:
    values = {"path": "a", "name": "f"}
    plain = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.structured(FunctionRewardConfig), values)
    )
    assert msgspec.convert(plain, FunctionRewardConfig) == FunctionRewardConfig(**values)
