"""A key whose type is text takes the text as it was written, wherever a job says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcore.overrides import words

from gcore_core.config.plan import load_plan
from gcore_core.config.yaml_source import read_written, written
from gcore_core.contract.errors import ConfigError

Job = Callable[..., Path]

#: What YAML 1.1 or 1.2 takes for something else than a text.
WORDS = (
    *("0012", "010", "0o14", "0x1F", "+5", "-0", "1e3", "1.10", ".5", "1_000", "12:30", ".inf"),
    *("yes", "no", "on", "OFF", "y", "true", "False", "2026-11-28", "2026-11-28 10:00:00"),
)
PLUGIN = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any, Literal
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@dataclass
class Inner:
    text: str = ""

@dataclass
class C:
    text: str = ""
    maybe: str | None = None
    word: Literal["on", "off"] = "off"
    several: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    inners: list[Inner] = field(default_factory=list)
    many: int | str = 1
    number: float = 0.0
    flag: bool = False
    free: Any = None

@hookimpl
def gcore_rewards():
    yield p.RewardProvider(name="mine", summary="", factory="mine:make", config=C)
"""


@pytest.fixture
def mine(job: Job, tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "mine.py").write_text(PLUGIN)

    def write(config: str = "{}", more: str = "") -> Path:
        reward = f"local: [mine.py]\nrewards: {{r: {{use: mine/mine, config: {config}}}}}\n"
        return job(reward + more)

    return write


def settings(file: Path, *overrides: str) -> dict[str, Any]:
    return dict(load_plan(file, overrides).config["rewards"]["r"]["config"])


@pytest.mark.parametrize("word", [*WORDS, "null", "~"])
def test_a_text_in_a_file_stays_as_it_was_written(mine: Job, word: str) -> None:
    quoted = f"{{text: '{word}', maybe: \"{word}\"}}"
    assert settings(mine(quoted)) == settings(mine()) | {"text": word, "maybe": word}
    config = settings(
        mine(
            f"{{text: {word}, several: [{word}, '{word}'], named: {{{word}: {word}}}, "
            f"inner: {{text: {word}}}, inners: [{{text: {word}}}]}}"
        )
    )
    assert config["text"] == word and config["several"] == [word, word]
    assert config["named"] == {word: word}
    assert config["inner"] == {"text": word} and config["inners"] == [{"text": word}]


@pytest.mark.parametrize("word", WORDS)
def test_a_text_on_the_command_line_stays_as_it_was_written(mine: Job, word: str) -> None:
    given = [
        f"run.name={word}",
        f"roles.policy.model.revision={word}",
        f"rewards.r.config.text= {word} ",
        f"rewards.r.config.maybe={word}",
        f"rewards.r.config.several=[{word}, b]",
        f"rewards.r.config.named.{word.replace('.', '').replace(' ', '')}={word}",
        f"rewards.r.config.inner={{text: {word}}}",
    ]
    plan = load_plan(mine("{text: other}"), given)
    assert plan.name == word
    assert plan.config["roles"]["policy"]["model"]["revision"] == word
    config = plan.config["rewards"]["r"]["config"]
    assert config["text"] == config["maybe"] == config["inner"]["text"] == word
    assert config["several"] == [word, "b"] and list(config["named"].values()) == [word]


@pytest.mark.parametrize(
    "text",
    [
        *("[a-z]+", "[^x", "{question}", "{a} and {b}", "a: b", "- x", "#5", "a #b", "---"),
        *("@x", "%x", "*x", "&x", "!x", "| x", "> x", "`x`", "a'b", "null", "~", "'a' b", "\\d{2}"),
    ],
)
def test_what_a_shell_gives_for_a_text_need_not_be_yaml(mine: Job, text: str) -> None:
    assert settings(mine(), f"rewards.r.config.text={text}")["text"] == text


def test_quotes_on_the_command_line_are_those_of_yaml(mine: Job) -> None:
    for text in (""" "a\\nb" """, "'a b'", '"null"', "!!str 5"):
        expected = {""" "a\\nb" """: "a\nb", "'a b'": "a b", '"null"': "null", "!!str 5": "5"}
        config = settings(mine(), f"rewards.r.config.maybe={text}")
        assert config["maybe"] == expected[text]


def test_the_last_override_of_a_text_or_of_what_it_is_part_of_wins(mine: Job) -> None:
    text = "rewards.r.config.inner.text"
    whole = "rewards.r.config.inner"
    assert settings(mine(), f"{text}={{a}}", f"{whole}={{text: 010}}")["inner"]["text"] == "010"
    assert settings(mine(), f"{whole}={{text: 010}}", f"{text}={{a}}")["inner"]["text"] == "{a}"
    assert settings(mine(), f"{text}=[x", f"{text}=y")["inner"]["text"] == "y"


def test_null_unsets_a_text_that_may_be_missing_and_is_one_elsewhere(mine: Job) -> None:
    assert settings(mine("{maybe: x}"), "rewards.r.config.maybe=null")["maybe"] is None
    assert settings(mine("{maybe: ~}"))["maybe"] is None
    assert load_plan(mine(), ["run.name=null"]).name == "job"
    assert settings(mine(), "rewards.r.config.text=")["text"] == ""
    with pytest.raises(ConfigError, match="Incompatible value 'None'"):
        load_plan(mine("{text: }"))


def test_a_choice_of_words_and_a_number_or_a_word_take_what_was_written(mine: Job) -> None:
    assert settings(mine("{word: on, many: 010}")) == settings(mine()) | {"word": "on", "many": 10}
    assert settings(mine("{many: 1e3}"))["many"] == "1e3"
    assert settings(mine("{many: yes}"))["many"] == "yes"
    free = settings(mine("{free: [0012, 1e3, yes, {0012: 2026-11-28}]}"))["free"]
    assert free == [12, 1000.0, "yes", {"0012": "2026-11-28"}]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=1_000", "run.steps: expected int, got str: '1_000'."),
        ("run.seed=12:30", "run.seed: expected int, got str: '12:30'."),
        ("run.steps=1e3", "run.steps: Value '1000.0' of type 'float' could not be converted"),
        ("run.deterministic=yes", "run.deterministic: expected bool, got str: 'yes'."),
        ("rewards.r.config.number=1_0.5", "rewards.r.config.number: expected float, got str"),
        ("rewards.r.config.number=infinity", "rewards.r.config.number: expected float, got str"),
        ("rewards.r.config.free=[1", "rewards.r.config.free: the value of override"),
        ("rewards.r.config.number=[1", "rewards.r.config.number: the value of override"),
        ("run.name=[1, 2]", "run.name: expected str, got a list: [1, 2]."),
        ('run.name={"a": 1}', "run.name: expected str, got a mapping: {'a': 1}."),
        ("rewards.r.config.several=a", "rewards.r.config.several: expected a list, got str"),
    ],
)
def test_what_is_no_value_of_a_key_by_yaml_1_2_is_refused(
    mine: Job, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plan(mine(), [override])
    assert str(caught.value).startswith(expected)


def test_numbers_have_no_octal_and_quoted_ones_are_numbers(mine: Job) -> None:
    plan = load_plan(mine("{number: '1e3', flag: 'true'}"), ["run.steps=010", 'run.seed="007"'])
    assert (plan.settings.run.steps, plan.settings.run.seed) == (10, 7)
    config = plan.config["rewards"]["r"]["config"]
    assert (config["number"], config["flag"]) == (1000.0, True)


@pytest.mark.parametrize("word", [*WORDS, "null", "~", "a: b", "#x", " x ", "\x85", "${a}"])
def test_a_resolved_configuration_gives_the_same_texts_again(
    mine: Job, tmp_path: Path, word: str
) -> None:
    again = tmp_path / "again.yaml"
    spelled = word.replace("${", r"\${").replace("\x85", r"\N")
    quote = '"' if "\x85" in word else "'"
    text = f"{quote}{spelled}{quote}"
    plan = load_plan(mine(f"{{text: {text}, several: [{text}], free: {text}}}"))
    assert plan.config["rewards"]["r"]["config"]["text"] == word
    again.write_text(written(plan.config), encoding="utf-8")
    assert read_written(again) == plan.config
    assert load_plan(again).config == plan.config | {"run": plan.config["run"]}


def test_a_value_of_python_for_a_text_is_what_yaml_writes_for_it(mine: Job) -> None:
    """A whole number has one form; what has none, or is no plain value, is refused."""

    def text_of(value: Any) -> Any:
        return settings(mine(), *words({"rewards.r.config.text": value}, {}))["text"]

    for word in (*WORDS, "null", "~", "", "[a]", "{a}", "a: b", '"x"'):
        assert text_of(word) == word
    assert [text_of(value) for value in (12, 0.5, True)] == ["12", "0.5", "true"]
    for value, problem in ((None, "Incompatible value 'None'"), (["a"], "got a list")):
        with pytest.raises(ConfigError, match=problem):
            text_of(value)
    given = words(
        {"rewards.r.config.several": ["null", "0012"], "rewards.r.config.maybe": None}, {}
    )
    config = settings(mine("{maybe: x}"), *given)
    assert config["several"] == ["null", "0012"] and config["maybe"] is None
    with pytest.raises(ConfigError, match="NoneType is not"):
        settings(mine(), *words({"rewards.r.config.several": [None]}, {}))
