"""Weights are what the files say: whatever else a directory holds is refused before a step."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_language.model_places import path_problems, problems
from gcore_language.models import load_model, load_reward_model, load_value_model
from gcore_language.own_rows import OwnRows, tensors_in_files
from gcore_language.pretrained import check_for_engine, refuse_not_finite
from safetensors.torch import load_file

from gcore_core.contract.errors import DataError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.looking import Look
from tests.support.broken_models import (
    BROKEN,
    GOOD,
    make_directory,
    save_family,
    set_config,
    write_weights,
)

SEEDS = range(2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tiny model, which is made once."""
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda family: save_family(root / family, family))


def said_of(directory: Path, *, use: str = "mine", **role: Any) -> list[str]:
    """What a check says of a policy with this model."""
    policy = {"use": use, "model": {"path": str(directory)}, "config": {}, **role}
    return _answered(problems({"roles": {"policy": policy}}, use, True))


def _answered(items: Iterable[str | Look]) -> list[str]:
    said: list[str] = []
    for item in items:
        if isinstance(item, str):
            said.append(item)
            continue
        try:
            said += import_attribute(item.function)(item.arguments)
        except DataError as error:
            said.append(f"{item.where}: {error.sentence()}")
    return said


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_directory_is_a_problem_of_its_key_and_a_data_error(
    kind: str, seed: int, models: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = make_directory(kind, tmp_path / "model", seed, models)
    said = said_of(directory)
    assert said and all(line.startswith("roles.policy.model.path: ") for line in said)
    with pytest.raises(DataError) as caught:
        load_model(str(directory), dtype="float32", images=True)
    assert str(directory) in str(caught.value)
    with pytest.raises(DataError):
        _open_by_rows(directory)


def _open_by_rows(directory: Path) -> None:
    """Opens a model as ranks of a sharded one do: without weights, then each tensor's rows."""
    model = load_model(str(directory), dtype="float32", images=True, empty=True)
    rows = OwnRows(directory)
    if not rows.lacks(model):
        rows.fill({name: torch.empty(t.shape) for name, t in tensors_in_files(model).items()})


@pytest.mark.parametrize("kind", GOOD)
def test_a_whole_directory_is_no_problem_and_opens(
    kind: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = make_directory(kind, tmp_path / "model", 0, models)
    assert said_of(directory) == []
    check_for_engine(directory)
    model = load_model(str(directory), dtype="float32", images=True)
    empty = load_model(str(directory), dtype="float32", images=True, empty=True)
    shapes, others = (
        {name: tensor.shape for name, tensor in one.named_parameters()} for one in (model, empty)
    )
    assert shapes == others, "without its weights it has the same tensors, tied where it was tied"
    _open_by_rows(directory)


# -- as what a model is opened ---------------------------------------------------------------------


def _as_reward_model(directory: Path, *, labels: int = 1, keep_head: bool = False) -> Path:
    """Turns a Llama into a sequence classifier."""
    tensors = load_file(directory / "model.safetensors")
    head = tensors["lm_head.weight"] if keep_head else tensors.pop("lm_head.weight")
    tensors["score.weight"] = head[:labels].clone()
    write_weights(directory / "model.safetensors", tensors)
    set_config(
        directory,
        architectures=["LlamaForSequenceClassification"],
        id2label={str(label): f"LABEL_{label}" for label in range(labels)},
    )
    return directory


def said_of_reward(directory: Path) -> list[str]:
    return _answered(path_problems("rewards.taste", str(directory), None, True, "classifier"))


@pytest.mark.parametrize("keep_head", [False, True], ids=["bare", "with a language head"])
def test_a_reward_model_may_have_the_head_of_a_language_model_beside_its_own(
    keep_head: bool, tmp_path: Path
) -> None:
    directory = _as_reward_model(save_family(tmp_path / "m", "llama"), keep_head=keep_head)
    load_reward_model(str(directory), dtype="float32")
    load_value_model(str(directory))
    assert said_of_reward(directory) == []
    assert said_of(directory, config={"reference_path": ""}) == [], "a critic may begin with it"
    assert "score.weight" in said_of(directory)[0], "a generator of text may not"


def test_a_reward_model_without_a_layer_or_with_a_nan_is_refused(tmp_path: Path) -> None:
    directory = _as_reward_model(save_family(tmp_path / "m", "llama"))
    file = directory / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, told in (
        ({n: t for n, t in whole.items() if n != name}, f"Missing: {name}"),
        ({**whole, name: torch.full_like(whole[name], torch.nan)}, f"{name} is not finite"),
        ({**whole, f"{name}_more": whole[name].clone()}, f"Not used: {name}_more"),
    ):
        write_weights(file, changed)
        for load in (partial(load_reward_model, dtype="float32"), load_value_model):
            with pytest.raises(DataError, match=re.escape(told)):
                load(str(directory))
        assert told in said_of_reward(directory)[0]


def test_a_language_model_as_reward_and_one_of_several_outputs_are_problems(
    tmp_path: Path,
) -> None:
    language = save_family(tmp_path / "language", "llama")
    assert "model is no reward model; It lacks score.weight" in said_of_reward(language)[0]
    several = _as_reward_model(save_family(tmp_path / "several", "llama"), labels=3)
    assert "model has 3 outputs; a scalar reward model has one" in said_of_reward(several)[0]
    with pytest.raises(DataError, match="3 outputs"):
        load_reward_model(str(several), dtype="float32")
    assert "3 outputs" in said_of(several, config={"reference_path": ""})[0]


def test_a_critic_of_a_language_model_gets_a_new_head_and_nothing_else_new(tmp_path: Path) -> None:
    directory = save_family(tmp_path / "m", "qwen3")
    model = load_value_model(str(directory), std=0.5)
    assert float(model.score.weight.detach().std()) > 0.1
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight")
    write_weights(directory / "model.safetensors", tensors)
    for empty in (False, True):
        with pytest.raises(DataError, match=r"Missing: model\.norm\.weight"):
            load_value_model(str(directory), empty=empty)


def test_a_reference_is_looked_at_like_the_policy(tmp_path: Path) -> None:
    good = save_family(tmp_path / "good", "llama")
    bad = make_directory("a weight is NaN", tmp_path / "bad")
    problems = said_of(good, config={"reference_path": str(bad)})
    assert all(problem.startswith("roles.policy.config.reference_path: ") for problem in problems)
    assert ["is not finite" in problem for problem in problems].count(True) == 1


def test_an_engine_may_load_quantised_weights_where_no_trainer_pushes(tmp_path: Path) -> None:
    directory = make_directory("config.json says quantised", tmp_path / "judge")
    role: dict[str, Any] = {"use": "mine", "model": {"path": str(directory)}, "config": {}}
    check_for_engine(directory)
    assert _answered(problems({"roles": {"judge": role}}, "mine", True, kind="engine")) == []
    role["follows"] = "policy"
    [problem] = _answered(problems({"roles": {"judge": role}}, "mine", True, kind="engine"))
    assert "the weights are quantised" in problem
    with pytest.raises(DataError, match="the weights are quantised"):
        load_model(str(directory), dtype="float32", images=True)


@pytest.mark.parametrize("kind", ["a tensor is missing", "a weight is NaN", "names are peft's"])
def test_what_an_engine_is_to_load_is_looked_at_before(kind: str, tmp_path: Path) -> None:
    directory = make_directory(kind, tmp_path / "model")
    with pytest.raises(DataError):
        check_for_engine(directory)


def test_an_architecture_that_transformers_does_not_know_is_left_to_the_engine(
    tmp_path: Path,
) -> None:
    check_for_engine(make_directory("config.json is of no known family", tmp_path / "model"))


def test_a_reader_of_rows_needs_no_architecture(tmp_path: Path) -> None:
    directory = make_directory("config.json is of no known family", tmp_path / "model")
    plan = {"roles": {"rollout": {"use": "mine", "model": {"path": str(directory)}}}}
    assert _answered(problems(plan, "mine", True, kind="files")) == []
    (directory / "model.safetensors").write_bytes(b"")
    assert "damaged or half written" in _answered(problems(plan, "mine", True, kind="files"))[0]


# -- what an error says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("names are peft's", "merge the adapter first (model.merge_and_unload())"),
        ("names have a beginning", "Save the tensors without the beginning '"),
        ("config.json ties nothing, and a head is missing", "set tie_word_embeddings: true in"),
        ("config.json ties what is two", "Set tie_word_embeddings: false in config.json"),
        ("config.json says quantised", "Take the model that was quantised"),
        ("there is only an adapter", "Merge the adapter into its base"),
        ("the file is a pointer of git LFS", "git lfs pull"),
        ("there are only pickles", "model.save_pretrained(directory) of transformers writes"),
    ],
)
def test_the_advice_is_for_what_is_wrong(kind: str, advice: str, tmp_path: Path) -> None:
    directory = make_directory(kind, tmp_path / "model")
    with pytest.raises(DataError, match=re.escape(advice)):
        load_model(str(directory), dtype="float32", images=True)


def test_an_expert_that_is_not_whole_is_named(tmp_path: Path) -> None:
    directory = save_family(tmp_path / "m", "mixtral")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    lost = [name for name in tensors if ".experts.3.w1." in name]
    write_weights(file, {name: t for name, t in tensors.items() if name not in lost})
    for empty in (False, True):
        with pytest.raises(DataError, match=re.escape(f"The files lack {sorted(lost)[0]}")):
            load_model(str(directory), dtype="float32", empty=empty)


def test_a_sum_that_overflows_is_no_nan() -> None:
    large = torch.full((1000,), 60000.0, dtype=torch.float16)
    refuse_not_finite([("large", large)], Path())
    with pytest.raises(DataError, match="1 of its 1000 numbers are NaN or infinite in float16"):
        refuse_not_finite([("large", large.index_fill(0, torch.tensor([7]), torch.inf))], Path())


def test_weights_too_large_for_float16_are_told_with_the_dtypes_that_hold_them() -> None:
    large = torch.tensor([1e5, 1.0])
    refuse_not_finite([("large", large.bfloat16())], Path())
    with pytest.raises(DataError, match="float16") as caught:
        refuse_not_finite([("large", large.half())], Path())
    assert "dtype: bfloat16 or float32" in str(caught.value)


# -- what it needs ---------------------------------------------------------------------------------

_WITHOUT_ACCELERATE = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: (
    None if name.partition(".")[0] == "accelerate" else find_spec(name, *more)
)
from gcore_language.models import load_model, load_value_model
from gcore_language.model_look import problems
for directory in sys.argv[1:]:
    model = load_model(directory, dtype="float32", images=True, empty=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    kind = {"kind": "trainer", "images": True, "trust_remote_code": False}
    assert list(problems({"directory": directory, **kind})) == []
load_value_model(sys.argv[1], empty=True)
assert "accelerate" not in sys.modules
"""


def test_a_model_is_opened_without_weights_where_accelerate_is_not_installed(
    models: Callable[[str], Path],
) -> None:
    directories = [str(models(family)) for family in ("llama", "mixtral", "qwen2_vl")]
    command = [sys.executable, "-c", _WITHOUT_ACCELERATE, *directories]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_headers_alone_are_read_of_a_model_without_weights(tmp_path: Path) -> None:
    """A rank of a sharded model would else read all of it."""
    directory = save_family(tmp_path / "m", "llama")
    with (directory / "model.safetensors").open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        stream.seek(8 + size)
        stream.write(b"\xff" * 1000)  # NaN
    load_model(str(directory), dtype="float32", empty=True)


@pytest.mark.parametrize("generates", [True, False])
def test_a_state_space_model_is_refused_where_it_would_generate(
    generates: bool, tmp_path: Path
) -> None:
    from gcore_language.model_look import problems
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=22, hidden_size=8, num_hidden_layers=1, state_size=2)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    look = {"directory": str(tmp_path), "images": False, "trust_remote_code": False}
    looked = problems({**look, "kind": "trainer", "generates": generates})
    if generates:
        with pytest.raises(DataError, match="a state-space model cannot generate here"):
            list(looked)
    else:
        assert list(looked) == []
