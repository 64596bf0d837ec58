"""A call of Python becomes a job: the YAML that the command line takes, and files beside it."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import json
import math
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gcore
import msgspec
import numpy as np
import pytest
import yaml
from gcore.jobs import _from_here, _model
from gcore.overrides import words
from gcore.rewards import rewards_of
from gcore.rows import anchored, dataset_of
from gcore_testing import fake

import gcore_core
from gcore_core.builtin.config import FunctionRewardConfig
from gcore_core.builtin.function_reward import FunctionScorer
from gcore_core.config.plan import load_plan
from gcore_core.config.user_functions import load_function
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

FAKE: dict[str, Any] = {
    "launcher": {"use": "core/inline"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    "local": [fake.__file__],
}
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 1


class Word(enum.StrEnum):
    YES = "yes"


@dataclasses.dataclass
class Point:
    x: int = 1


class Struct(msgspec.Struct):
    x: int = 1


class Pair(NamedTuple):
    x: int = 1
    y: int = 2


class MissingInPandas:
    """Looks like pandas.NA."""


#: name -> a value for which JSON has no word, though msgspec or json would write one
ODD = {
    "bytes": b"2",
    "bytearray": bytearray(b"2"),
    "memoryview": memoryview(b"2"),
    "set": {1},
    "frozenset": frozenset({1}),
    "datetime": datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC),
    "date": datetime.date(2026, 11, 28),
    "time": datetime.time(10),
    "timedelta": datetime.timedelta(1),
    "Decimal": decimal.Decimal("1.5"),
    "Fraction": fractions.Fraction(1, 2),
    "UUID": uuid.UUID(int=1),
    "Enum": Colour.RED,
    "IntEnum": Level.HIGH,
    "StrEnum": Word.YES,
    "dataclass": Point(),
    "Struct": Struct(),
    "namedtuple": Pair(),
    "complex": 1j,
    "path": Path("a"),
    "generator": (n for n in ()),
    "deque": collections.deque([1]),
    "NA": MissingInPandas(),
    "large": 2**64,
    "small": -(2**63) - 1,
    "integer key": {1: "a"},
    "null key": {None: "a"},
    "bool key": {True: "a"},
    "Enum key": {Word.YES: 1},
    "bytes key": {b"a": 1},
    "numpy bytes": np.bytes_(b"2"),
    "numpy time": np.datetime64("2026-11-28T00:00:00", "ns"),
    "numpy span": np.timedelta64(1, "ns"),
    "numpy complex": np.complex64(1),
    "numpy long": np.longdouble(1),
    "array of bytes": np.array([b"2"]),
    "array of times": np.array(["2026-11-28"], dtype="datetime64[ns]"),
    "array of records": np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    "array of objects": np.array([b"2"], dtype=object),
}


def right(record: ScoredRecord) -> float:
    return float(record.text.endswith(record.prompt.fields["answer"]))


def shorter(records: list[ScoredRecord]) -> list[float]:
    return [-float(len(record.text)) for record in records]


def as_in_trl(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    return [float(text.endswith(a)) for text, a in zip(completions, answer, strict=True)]


def with_everything(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(columns)) for _ in completions]


def of_tokens(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def of_tokens_if_there(completions: list[str], completion_ids: Any = None) -> list[float]:
    return [0.0 for _ in completions]


def with_a_column(completions: list[str], level: list[int | None]) -> list[float]:
    return [float(one or 0) for one in level]


def job(**changes: Any) -> Any:
    given = {"model": None, "reward": right, "data": ROWS, "algorithm": FAKE, **changes}
    return gcore.job(**given)


def scores(
    reward: Any, directory: Path, rows: list[Mapping[str, Any]], texts: list[str]
) -> list[Any]:
    """What a worker gives for these rows and answers."""
    section, files = rewards_of(reward)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    (chosen,) = section.values()
    config = dict(chosen["config"])
    config["path"] = str(directory / config["path"])
    context: Any = None
    scorer = FunctionScorer(FunctionRewardConfig(**config), context)
    records = []
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        fields = dict(row)
        asked = fields.pop("prompt")
        prompt = (
            Prompt(row=number, text=asked, fields=fields)
            if isinstance(asked, str)
            else Prompt(row=number, messages=asked, fields=fields)
        )
        records.append(
            ScoredRecord(
                ordinal=number, sample=0, prompt=prompt, text=text, status="finished", columns={}
            )
        )
    try:
        return [score.value for score in scorer.score(records)]
    finally:
        scorer.close()


@pytest.mark.parametrize("name", ["completions", "prompts", "completion_ids"])
def test_a_field_of_rows_never_takes_the_place_of_what_the_policy_wrote(
    tmp_path: Path, name: str
) -> None:
    rows = [{"prompt": "2+3=", "answer": "5", name: ["5"]}]
    with pytest.raises(ConfigError, match=f"rows have a field '{name}', which with_everything"):
        job(reward=with_everything, data=rows)
    assert scores(with_everything, tmp_path, rows, ["7"]) == [None], "as where data are in a file"
    job(reward=right, data=rows)
    if name == "completion_ids":  # a function that does not take it never sees it
        job(reward=with_a_column, data=[{**rows[0], "level": 1}])


# -- the job ---------------------------------------------------------------------------------------


def test_the_yaml_of_a_call_is_the_job_that_it_runs(tmp_path: Path) -> None:
    made = job(run__steps=3, overrides={"run.seed": 5})
    assert yaml.safe_load(made.yaml) == made.tree
    plan = load_plan(made.write(tmp_path))
    assert (plan.settings.run.steps, plan.settings.run.seed) == (3, 5)
    assert Path(plan.at("rewards.right.config.path")) == tmp_path / "right.py"
    assert Path(plan.at("data.config.path")).read_text().count("\n") == len(ROWS)


def test_a_path_through_the_latest_run_names_that_run(tmp_path: Path) -> None:
    weights = tmp_path / "001" / "weights"
    weights.mkdir(parents=True)
    (tmp_path / "latest").symlink_to("001")
    for path in (tmp_path / "latest" / "weights", str(tmp_path / "latest" / "weights")):
        assert anchored({"path": path}) == {"path": str(weights)}
        assert dataset_of(path, "", "")[0]["config"] == {"path": str(weights)}
        assert _model(path) == ({"path": str(weights)}, {})


def test_a_run_lies_below_a_directory_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tries #: first"
    place.mkdir()
    monkeypatch.chdir(place)
    followed: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr("gcore.follow.follow", lambda *given: followed.append(given))
    job().train()
    ((file, given),) = followed
    assert load_plan(file, given).settings.run.dir == str(place / "runs" / "train" / "001")


def test_paths_in_overrides_of_a_call_are_those_of_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    given = {"roles.reference.model.path": "base", "roles.judge": {"model": {"path": Path("base")}}}
    here = [_from_here(word) for word in words(given, {"data__config__path": "org/name"})]
    assert here == [
        f'roles.reference.model.path="{tmp_path / "base"}"',
        f'roles.judge={{"model":{{"path":"{tmp_path / "base"}"}}}}',
        'data.config.path="org/name"',
    ]
    tree = {**FAKE, "roles": {**FAKE["roles"], "policy": {**FAKE["roles"]["policy"]}}}
    tree["roles"]["policy"]["model"] = {"path": "base"}
    (tmp_path / "mine.py").touch()
    made = job(algorithm={**tree, "local": [*FAKE["local"], "mine.py"]}).tree
    assert made["roles"]["policy"]["model"]["path"] == str(tmp_path / "base")
    assert made["local"] == [*FAKE["local"], str(tmp_path / "mine.py")]


def test_settings_of_a_provider_that_was_replaced_are_left_out() -> None:
    tree = {**FAKE, "filter": {"use": "core/varied", "config": {"reward": "right"}}}
    assert job(algorithm=tree).tree["filter"]["config"] == {"reward": "right"}
    replaced = job(algorithm=tree, filter__use="core/keep-all").tree
    assert replaced["filter"] == {"use": "core/keep-all"}


def test_a_name_with_a_dot_in_it_stays_one_name() -> None:
    model = {"path": "org/x", "settings": {"layer.0": 1}}
    assert job(model=model).tree["roles"]["policy"]["model"] == model


def test_a_job_of_ones_own_stays_as_it_is() -> None:
    before = json.dumps(FAKE)
    job(run__steps=3)
    assert json.dumps(FAKE) == before


@pytest.mark.parametrize("name", ["cispo", "dapo", "dr-grpo", "grpo", "gspo", "rloo"])
def test_every_template_is_a_whole_job(name: str) -> None:
    """``gcore.job`` has resolved and checked it when it returns."""
    tree = job(algorithm=name, model="org/model", evaluation=ROWS).tree
    assert tree["run"]["name"] == name
    assert tree["roles"]["policy"]["model"] == {"path": "org/model"}


def test_what_is_wrong_with_a_call_is_told_without_a_temporary_file() -> None:
    with pytest.raises(ConfigError) as caught:
        job(run__stepz=3)
    assert "/tmp" not in str(caught.value)
    assert "stepz" in str(caught.value)


@pytest.mark.parametrize("package", ["gcore", "gcore_core"])
def test_importing_the_package_imports_no_other_module_of_it(package: str) -> None:
    program = (
        f"import sys, {package}; print([m for m in sys.modules if m[:5] in ('gcore', 'numpy')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"['{package}']"


def test_a_call_of_the_package_of_before_names_the_one_of_now() -> None:
    with pytest.raises(ImportError, match=r"gcore_core\.train is gcore\.train now, of gcore-tools"):
        gcore_core.train  # noqa: B018


def test_run_reads_a_file() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        gcore.run("nowhere.yaml")


# -- overrides -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [3, 1e-05, -0.25, True, None, "a: b, {c}", "", ["x", 1], {"a": {"b": [1]}}, np.float64(2)],
)
def test_a_value_arrives_as_it_was_given(value: Any) -> None:
    """Model settings take any value, so that nothing converts it on the way."""
    arrived = job(model={"path": "org/x", "setting": 0}, roles__policy__model__setting=value).tree
    assert arrived["roles"]["policy"]["model"]["setting"] == value


@pytest.mark.parametrize("value", [[1.0, math.inf], {"high": [math.nan]}])
def test_a_number_within_a_list_that_is_not_finite_is_refused(value: Any) -> None:
    """As JSON it would be null, which most keys take for "not set"."""
    with pytest.raises(ConfigError, match="cannot stand in YAML"):
        words({"roles.policy.model.setting": value}, {})


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "path"])
def test_a_setting_for_which_json_has_no_word_is_refused(kind: str) -> None:
    for value in (ODD[kind], [ODD[kind]], {"a": ODD[kind]}):
        with pytest.raises(ConfigError, match="cannot stand in YAML"):
            words({"roles.policy.model.setting": value}, {})


@pytest.mark.parametrize("kind", ["bytes", "set", "date", "Decimal", "Enum", "StrEnum", "Struct"])
def test_a_value_in_a_job_of_ones_own_for_which_yaml_has_no_word_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand in YAML"):
        job(model={"path": "org/x", "setting": [ODD[kind]]})


def test_the_two_forms_say_the_same_and_keywords_win() -> None:
    assert words({"run.steps": 3}, {}) == words(None, {"run__steps": 3}) == ["run.steps=3"]
    assert words(None, {"run": {"steps": 3, "seed": 1}}) == ["run.steps=3", "run.seed=1"]
    assert words(["run.steps=2"], {"run__steps": 3}) == ["run.steps=2", "run.steps=3"]
    infinite = words({"a.low": -math.inf, "a.odd": math.nan}, {"a__high": math.inf})
    assert infinite == ["a.low=-.inf", "a.odd=.nan", "a.high=.inf"]


# -- rewards and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(right, [1.0, 0.0]), (shorter, [-1.0, -2.0]), (as_in_trl, [1.0, 0.0])],
)
def test_a_function_scores_in_a_worker_as_it_would_here(
    reward: Any, expected: list[float], tmp_path: Path
) -> None:
    assert scores(reward, tmp_path, ROWS, ["2", "13"]) == expected


def test_a_column_that_the_first_row_lacks_is_a_column(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = [ROWS[0], {**ROWS[1], "level": 3}]
    assert scores(with_a_column, tmp_path, rows, ["2", "4"]) == [0.0, 3.0]


def test_a_function_of_trl_gets_chats_and_all_columns(tmp_path: Path) -> None:
    chat = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "level": 1}
    assert scores(with_everything, tmp_path, [chat], ["4"]) == [3.0]  # prompts, answer, level


def test_a_function_that_needs_tokens_of_trl_is_refused() -> None:
    with pytest.raises(ConfigError, match="of_tokens needs what TRL alone has: completion_ids"):
        rewards_of(of_tokens)
    assert rewards_of(of_tokens_if_there)[0]


def test_rewards_are_named_and_weighted() -> None:
    several, _ = rewards_of([right, "rewards/exact-match"])
    assert list(several) == ["right", "exact_match"]
    named, files = rewards_of({"a": right, "b": {"function": shorter, "weight": 0.1}})
    assert named["b"] == {
        "use": "core/function",
        "weight": 0.1,
        "config": {"path": "b.py", "name": "shorter", "batch": True},
    }
    assert sorted(files) == ["a.py", "b.py"]


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two rewards are named 'right'"):
        rewards_of([right, right])


def of_the_model(directory: str, config: dict[str, Any], progress: Any) -> None:
    Path(directory, "made").write_text("a model")


@pytest.mark.parametrize("name", ["of_the_model", "of_the_model_model", "_of_the_model"])
def test_a_model_and_a_reward_of_one_name_travel_in_files_of_their_own(
    name: str, tmp_path: Path
) -> None:
    """The name of a reward is the user's to choose: none may take the place of the model's file."""
    made = job(model=of_the_model, reward={name: right})
    folder = made.write(tmp_path).parent
    make = made.tree["roles"]["policy"]["model"]["make"]
    load_function(folder / make["path"], make["name"])(str(tmp_path), {}, None)
    assert (tmp_path / "made").read_text() == "a model"
    config = made.tree["rewards"][name]["config"]
    assert load_function(folder / config["path"], config["name"]).__name__ == "right"


@pytest.mark.parametrize("name", ["a/b", "../b", "a b", "1", ""])
def test_a_name_that_no_metric_and_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a reward"):
        rewards_of({name: right})


def test_a_name_of_a_reward_hides_no_module_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files lie in one folder: ``import json`` must not mean the reward of that name."""
    (tmp_path / "size.py").write_text("def size(record):\n    return float(len(record))\n")
    monkeypatch.syspath_prepend(tmp_path)
    size = importlib.import_module("size").size
    made = job(reward={"json": right, "msgspec": right, "own": size, "size": size})
    folder = made.write(tmp_path / "job").parent
    for name, reward in made.tree["rewards"].items():
        config = reward["config"]
        function = load_function(folder / config["path"], config["name"])
        assert name in ("json", "msgspec") or function("four") == 4.0
    assert {"json.py", "msgspec.py"}.isdisjoint(made.files)
    assert made.files["size.py"] == (tmp_path / "size.py").read_bytes()


class Frame:
    """Looks like a DataFrame."""

    columns = ("prompt",)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"prompt": "1+1=", "n": np.int64(2)}]


def test_rows_come_from_lists_frames_and_iterables(tmp_path: Path) -> None:
    for data in (
        Frame(),
        iter([{"prompt": "1+1=", "n": 2}]),
        [{"prompt": "1+1=", "n": np.int64(2)}],
    ):
        section, files = dataset_of(data, "rows.jsonl", "data")
        assert json.loads(files["rows.jsonl"]) == {"prompt": "1+1=", "n": 2}
        assert section["config"] == {"path": "rows.jsonl"}


def test_a_narrow_float_of_a_row_is_its_shortest_decimal() -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    narrow = np.float32(3.14)
    rows = [{"prompt": "?", "n": narrow, "half": np.float16(0.1), "many": np.float32([1.1, 2.2])}]
    frame = pandas.DataFrame({"prompt": ["?"], "n": np.float32([3.14]), "half": np.float16([0.1])})
    masked = pandas.DataFrame({"prompt": ["?"], "n": pandas.array([3.14], "Float32")})
    features = {"prompt": datasets.Value("string"), "n": datasets.Value("float32")}
    table = datasets.Dataset.from_dict(
        {"prompt": ["?"], "n": [narrow]}, features=datasets.Features(features)
    )
    for data in (rows, frame, masked, table):
        row = json.loads(dataset_of(data, "rows.jsonl", "data")[1]["rows.jsonl"])
        expected = {"prompt": "?", "n": 3.14, "half": 0.1, "many": [1.1, 2.2]}
        assert row == {name: expected[name] for name in row} and "n" in row


def test_chats_are_recognised_and_files_stay_where_they_are(tmp_path: Path) -> None:
    chat = [{"prompt": [{"role": "user", "content": "hi"}]}]
    section, _ = dataset_of(chat, "rows.jsonl", "data")
    section, files = dataset_of(tmp_path / "mine.jsonl", "rows.jsonl", "data")
    assert section["config"]["path"] == str(tmp_path / "mine.jsonl")
    assert files == {}


@pytest.mark.parametrize("value", ["\ud800"])
def test_a_row_that_no_json_can_hold_is_named(value: Any) -> None:
    """Half a character."""
    with pytest.raises(DataError, match="row 1 does not fit into JSON"):
        dataset_of([{"prompt": "1+1="}, {"prompt": "1+1=", "answer": value}], "rows.jsonl", "data")


@pytest.mark.parametrize("kind", ODD)
def test_a_row_value_for_which_json_has_no_word_is_refused_with_its_place(kind: str) -> None:
    odd = ODD[kind]
    for value in (odd, [0, odd], {"inner": {"deep": [odd]}}, (odd,)):
        for rows in ([{"prompt": "", "answer": value}], iter([{"prompt": "", "answer": value}])):
            with pytest.raises(DataError, match=r"row 0 does not fit into JSON: 'answer' holds "):
                dataset_of(rows, "rows.jsonl", "data")

    class Odd(Frame):
        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            return [{"prompt": "1+1=", "answer": odd}]

    with pytest.raises(DataError, match=r"row 0 does not fit into JSON: 'answer' holds "):
        dataset_of(Odd(), "rows.jsonl", "data")


def test_the_place_and_the_type_of_an_odd_value_are_told() -> None:
    rows = [{"prompt": "", "answer": [{"a": 1}, {"a": decimal.Decimal(2)}]}]
    with pytest.raises(DataError) as caught:
        dataset_of(rows, "rows.jsonl", "data")
    assert "'answer' holds a value of type decimal.Decimal, at [1]['a']." in str(caught.value)
    with pytest.raises(DataError, match="row 0 .*: it holds a key of type int: 3"):
        dataset_of([{"prompt": "", 3: "x"}], "rows.jsonl", "data")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DataError, match="row 0 does not fit into JSON"):
        dataset_of([{"prompt": "", "answer": endless}], "rows.jsonl", "data")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ((1, "a"), [1, "a"]),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (collections.OrderedDict(a=1), {"a": 1}),
        (-(2**63), -(2**63)),
        (None, None),
    ],
)
def test_what_json_has_a_word_for_arrives_as_it_is(value: Any, read: Any) -> None:
    _, files = dataset_of([{"prompt": "", "answer": value}], "rows.jsonl", "data")
    arrived = json.loads(files["rows.jsonl"])["answer"]
    assert arrived == read and type(arrived) is type(read)


@pytest.mark.parametrize("data", [[], 5, [3], [{"prompt": object()}]])
def test_what_holds_no_rows_is_refused(data: Any) -> None:
    with pytest.raises(DataError):
        dataset_of(data, "rows.jsonl", "data")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, [1.0, math.inf]])
def test_a_number_that_json_lacks_is_refused_and_does_not_become_null(value: Any) -> None:
    for odd in (value, {"inner": value}, np.array(value)):
        with pytest.raises(DataError, match="row 1 .*'answer' holds NaN or an infinity"):
            dataset_of([{"prompt": "1+1="}, {"prompt": "", "answer": odd}], "rows.jsonl", "data")


def test_a_value_that_a_frame_lacks_is_null() -> None:
    class Lacking(Frame):
        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            return [{"prompt": "1+1=", "n": math.nan}]

    _, files = dataset_of(Lacking(), "rows.jsonl", "data")
    assert json.loads(files["rows.jsonl"]) == {"prompt": "1+1=", "n": None}


@pytest.mark.parametrize("name", ["0012", "1e3", "yes", "null", "2026-11-28", "1_000"])
def test_a_text_of_a_call_is_that_text_in_the_job_that_it_makes(name: str, tmp_path: Path) -> None:
    tree = {**FAKE, "run": {"name": name}}
    for made in (job(run__name=name), job(algorithm=tree), job(overrides=[f'run.name="{name}"'])):
        assert made.tree["run"]["name"] == name
        assert load_plan(made.write(tmp_path)).name == name


def test_a_number_for_a_text_of_a_call_is_its_digits(tmp_path: Path) -> None:
    for made in (job(run__name=12), job(algorithm={**FAKE, "run": {"name": 12}})):
        assert made.tree["run"]["name"] == "12" and load_plan(made.write(tmp_path)).name == "12"


def test_what_is_wrong_with_a_call_is_told_without_the_way_on_which_it_was_found() -> None:
    with pytest.raises(ConfigError, match="did you mean 'steps'") as raised:
        gcore.job(model=None, reward="fake", data=ROWS, algorithm=FAKE, run={"step": 4})
    frames = [entry.name for entry in raised.traceback]
    assert frames[-1] == "job" and len(frames) == 2, frames
