"""The recipes do what their goldens hold: losses, ordinals and final weights. See record.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracles import record

NEEDED = (
    "torch",
    "transformers",
    "sklearn",
    "gcore_torch",
    "gcore_diffusion",
    "gcore_rewards.genrm",
    "gcore_placement",
)


class Recordings:
    """Runs every case at most once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._recordings: dict[str, dict[str, Any]] = {}
        self._machine = record.fingerprint()

    def of(self, name: str) -> dict[str, Any]:
        if name not in self._recordings:
            directory = self._directory / name
            directory.mkdir()
            recording, _ = record.run(record.CASES[name], directory, self._directory / "models")
            self._recordings[name] = {"machine": self._machine, **recording}
        return self._recordings[name]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    for module in NEEDED:
        pytest.importorskip(module)
    return Recordings(tmp_path_factory.mktemp("oracles"))


@pytest.mark.slow
@pytest.mark.parametrize("name", record.CASES)
def test_a_recipe_reproduces_its_golden(recordings: Recordings, name: str) -> None:
    differences, not_compared = record.compare(name, recordings.of(name))
    assert differences == []
    if not_compared:
        pytest.skip(not_compared)


@pytest.mark.slow
def test_the_number_of_controllers_does_not_change_the_weights(recordings: Recordings) -> None:
    assert len({recordings.of(name)["weights_sha256"] for name in record.SAME_WEIGHTS}) == 1


def test_every_case_has_a_golden_with_its_settings() -> None:
    assert {path.stem for path in record.GOLDENS.glob("*.json")} == set(record.CASES)
    for name, case in record.CASES.items():
        golden = record.load_golden(name)
        assert golden["settings"] == case.settings
        (steps,) = [int(word.partition("=")[2]) for word in case.settings if "run.steps" in word]
        for recording in golden["recordings"]:
            assert len(recording["steps"]) == steps + 1
            assert len(recording["drawn"]) == steps
            assert recording["position"]["step"] == steps


def test_every_changed_value_is_reported_as_a_difference() -> None:
    """On the recording machine any value; on another one ordinals, counts and other losses."""
    golden = record.load_golden("quickstart")["recordings"][0]
    assert record.compare("quickstart", golden) == ([], "")

    def changed(at: tuple[Any, ...], value: Any, **machine: str) -> list[str]:
        recording = record.json.loads(record.json.dumps(golden))
        recording["machine"].update(machine)
        node = recording
        for key in at[:-1]:
            node = node[key]
        node[at[-1]] = value
        return list(record.compare("quickstart", recording)[0])

    loss = golden["steps"][3]["metrics"]["loss"]
    at_loss = ("steps", 3, "metrics", "loss")
    assert len(changed(at_loss, loss * (1 + 1e-15))) == 1
    assert changed(at_loss, loss * (1 + 1e-5), vendor="another") == []
    assert len(changed(at_loss, loss * (1 + 1e-3), vendor="another")) == 1
    assert len(changed(("weights_sha256",), "00")) == 1
    assert changed(("weights_sha256",), "00", vendor="another") == []
    for ordinals in (("drawn", 2, "ordinals"), ("drawn", 2, "ordinals_trained")):
        assert len(changed(ordinals, "0-31", vendor="another")) == 1
    assert len(changed(("position", "next_ordinal"), 255, vendor="another")) == 1
