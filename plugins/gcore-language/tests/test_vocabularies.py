"""A model that is fed the policy's ids reads them as the policy does, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gcore_language import model_places, vocabularies
from gcore_language.prompts import load_tokenizer
from gcore_language.tiny import save_tokenizer

from gcore_core.contract.errors import DataError
from gcore_core.contract.looking import Look


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models of the hub's cache: one, the same once more, and one with two letters exchanged."""
    for name in ("one", "same", "other"):
        repository = tmp_path / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("a" * 40)
        (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
        save_tokenizer(repository / "snapshots" / ("a" * 40))
    file = tmp_path / "models--org--other" / "snapshots" / ("a" * 40) / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    file.write_text(json.dumps(content))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def role(path: str, **config: Any) -> dict[str, Any]:
    return {"use": "mine", "model": {"path": path}, "config": {"reference_path": "", **config}}


def refusals(roles: dict[str, Any]) -> list[str]:
    said = []
    for look in model_places.problems({"roles": roles}, "mine", True):
        if isinstance(look, Look) and look.function == "gcore_language.vocabularies:problems":
            try:
                said += list(vocabularies.problems(look.arguments))
            except DataError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("name", ["same", "other"])
def test_a_critic_of_the_hub_reads_the_policys_ids_as_it_does(hub: Path, name: str) -> None:
    said = refusals({"policy": role("org/one"), "critic": role(f"org/{name}")})
    assert [text.split(":")[0] for text in said] == (
        ["roles.critic.model.path"] if name == "other" else []
    ), said


@pytest.mark.parametrize("name", ["same", "other"])
def test_a_reference_reads_the_policys_ids_as_it_does(hub: Path, name: str) -> None:
    said = refusals({"policy": role("org/one", reference_path=f"org/{name}")})
    assert bool(said) is (name == "other")
    assert all("roles.policy.config.reference_path" in text for text in said)
    assert all("2 of the policy's" in text for text in said)


def test_a_model_without_a_tokenizer_is_fed_the_policys_ids(hub: Path, tmp_path: Path) -> None:
    one = model_places.directory_here("org/one")
    assert one is not None
    tokenizer = load_tokenizer(str(one), None)
    (tmp_path / "bare").mkdir()
    vocabularies.refuse_other_tokens(tokenizer, tmp_path / "bare", "here")
    broken = shutil.copytree(one, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    vocabularies.refuse_other_tokens(tokenizer, broken, "here")
