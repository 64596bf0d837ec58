"""contrib/codemod-0.3 rewrites what configs and descriptions of 0.2 said to ``traits()``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "contrib/codemod-0.3/convert_traits.py"
CONFIG = """\
from dataclasses import dataclass

from gcore_core.contract.abilities import required_by


@dataclass
class Base:
    clip: float = 0.2

    def logprob_band(self) -> float:
        \"\"\"Says how exact it is.\"\"\"
        return self.clip / 2


@dataclass
class Engine(Base):
    def keeps_weights(self) -> bool:
        return self.clip > 1

    def samples_alike(self) -> str:
        if self.clip:
            return "clip"
        return ""


def needs(config):
    return required_by(config) | config.requires()
"""
HOOKS = """\
def hooks():
    yield p.GeneratorProvider(
        summary="-",
        config=Engine,
        capabilities=frozenset({"abort"} | {"weights.push", "mine:own"}),
        factory="a:b",
    )
    yield p.RewardProvider(summary="-", factory="a:c", asks=True)
"""


def test_methods_and_words_become_fields(tmp_path: Path) -> None:
    config, hooks = tmp_path / "config.py", tmp_path / "hooks.py"
    config.write_text(CONFIG)
    hooks.write_text(HOOKS)
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = config.read_text()
    assert "from dataclasses import replace\n" in text
    assert "from gcore_core.contract.traits import Traits\n" in text
    assert "        return Traits(logprob_band=self.clip / 2)\n" in text
    assert (
        "        return replace(super().traits(), abort=True, receives_weights=True, "
        "samples_alike=self._samples_alike())\n"
    ) in text
    assert "    def _samples_alike(self) -> str:\n" in text
    assert "def keeps_weights" in text and "def logprob_band" not in text
    assert "    return traits_of(config).requires | config.requires()\n" in text
    assert "capabilities" not in hooks.read_text()
    assert done.stdout.splitlines() == [
        str(config),
        str(hooks),
        f"{config}:17: keeps_weights: say it where memory of the description says what a worker "
        "needs asleep",
        f"{config}:27: if this asks a config, write traits().requires",
        f"{hooks}:5: 'mine:own' has no field; nothing reads it",
        f"{hooks}:8: give it a config class with traits(): Traits(asks=True)",
    ]


def test_capabilities_of_a_contract_test_are_left_and_named(tmp_path: Path) -> None:
    test = tmp_path / "test_contract.py"
    test.write_text(
        "class TestMine(GeneratorContract):\n"
        '    capabilities = frozenset({"sleep"})\n\n'
        '    @claims("weights.push")\n    def test_more(self): ...\n'
    )
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{test}:2: write traits = Traits(...), with the words as fields",
        f"{test}:4: write @claims('receives_weights')",
    ]
