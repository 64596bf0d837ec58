"""Reported faults are planted into real runs, and what is said of them is what is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_testing import museum
from gcore_testing.museum import Exhibit, Expected, Scene

from gcore_core.contract.errors import ConfigError, ContractError, PluginBroken, WeightMismatch
from gcore_core.kits.commands import run_file
from tests.museum import commands
from tests.museum.exhibits import ALL


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", ALL, ids=lambda exhibit: exhibit.id)
def test_a_fault_is_found_and_named_and_a_control_is_not(exhibit: Exhibit, tmp_path: Path) -> None:
    finding = museum.show(exhibit, commands.JOB, tmp_path / "run", run_file)
    expected = museum.QUIET if exhibit.control else museum.FOUND
    assert finding.outcome == expected, finding


def test_every_kind_of_fault_is_shown_and_ids_are_unique() -> None:
    assert len({exhibit.id for exhibit in ALL}) == len(ALL)
    assert {exhibit.kind for exhibit in ALL} == set(museum.KINDS)


def test_an_unknown_exhibit_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'prefix-cache-kept'"):
        commands.chosen(["prefix-cache-keptt"])


def test_a_letter_that_is_no_kind_is_refused() -> None:
    assert {exhibit.kind for exhibit in commands.chosen(kinds="AB")} == {"A", "B"}
    for kinds in ("Az", "a", "A,B"):
        with pytest.raises(ConfigError, match=r"(?s)has no kind .*Take some of ABC"):
            commands.chosen(kinds=kinds)


def exhibit(plant, **changes) -> Exhibit:
    texts = {"thread": "x#1", "fault": "", "shown": ""}
    expected = Expected(detector="", error="WeightMismatch", names=("tensor a",))
    return Exhibit(
        **{"id": "x", "kind": "A", "plant": plant, "expected": expected, **texts, **changes}
    )


def _shown(plant, runs, tmp_path: Path, **changes) -> museum.Finding:
    def run(file, overrides, *rest):
        return runs()

    return museum.show(exhibit(plant, **changes), tmp_path / "job.yaml", tmp_path / "run", run)


def _acts(scene: Scene) -> None:
    scene.wrap("pathlib:Path.touch", lambda touch: lambda self: (scene.act(), touch(self)))


def test_a_fault_that_never_acts_proves_nothing(tmp_path: Path) -> None:
    assert _shown(_acts, lambda: 0, tmp_path).outcome == museum.IDLE


def test_an_error_without_the_expected_words_is_named_otherwise(tmp_path: Path) -> None:
    def fails(words: str):
        def run() -> None:
            (tmp_path / "file").touch()
            raise WeightMismatch(words)

        return run

    assert _shown(_acts, fails("tensor a"), tmp_path).outcome == museum.FOUND
    finding = _shown(_acts, fails("tensor b"), tmp_path)
    assert (finding.outcome, finding.lacking) == (museum.OTHERWISE, ["tensor a"])


def test_a_fault_that_a_run_survives_is_not_found_and_a_control_is_quiet(tmp_path: Path) -> None:
    def survives() -> None:
        (tmp_path / "file").touch()

    assert _shown(_acts, survives, tmp_path).outcome == museum.MISSED
    quiet = {"control": True, "expected": Expected(detector="")}
    assert _shown(_acts, survives, tmp_path, **quiet).outcome == museum.QUIET


def test_wrappers_are_taken_off_again_also_those_of_inherited_methods() -> None:
    class Base:
        def say(self) -> str:
            return "base"

    class Derived(Base):
        pass

    import sys

    sys.modules[__name__].Derived = Derived  # type: ignore[attr-defined]
    scene = Scene()
    scene.wrap(f"{__name__}:Derived.say", lambda say: lambda self: f"planted {say(self)}")
    assert Derived().say() == "planted base" and Base().say() == "base"
    scene.close()
    assert Derived().say() == "base" and "say" not in vars(Derived)


def test_a_seam_that_is_gone_is_refused() -> None:
    with pytest.raises(PluginBroken, match="has no 'gone'"):
        Scene().wrap("pathlib:Path.gone", lambda original: original)


def test_a_control_expects_no_error() -> None:
    with pytest.raises(ContractError, match="a control expects no error"):
        exhibit(_acts, control=True)
