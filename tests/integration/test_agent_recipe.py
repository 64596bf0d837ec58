"""Agents that own their loop: the recipe's, and one of the standard library alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore_core.config.plan import load_plan
from gcore_core.run.saved_weights import weights_sha256
from tests.support import peers

pytest.importorskip("gcore_environments")
pytest.importorskip("gcore_torch")
pytest.importorskip("gcore_algorithms")
RECIPES = Path(__file__).parents[2] / "recipes"
PATIENCE_S = 300.0
#: The calculator's task over HTTP, in the standard library alone.
AGENT = """
import asyncio
import json
import urllib.request


class Agent:
    async def run(self, row, seed, endpoint):
        return await asyncio.to_thread(self.play, row, endpoint)

    def play(self, row, endpoint):
        messages, called = [{"role": "user", "content": row["prompt"]}], 0.0
        for _ in range(3):
            choice = self.ask(endpoint, messages)
            said = choice["message"]["content"]
            if choice["finish_reason"] != "stop" or not said.startswith("*"):
                right = choice["finish_reason"] == "stop" and said[-2:] == row["answer"]
                return {"right": float(right), "called": called}
            called += 1.0
            try:
                told = f":{sum(int(term) for term in said[1:-1].split('+')):02d}y"
            except ValueError:
                told = ":n"
            messages += [choice["message"], {"role": "tool", "content": told}]
        return {"right": 0.0, "called": called}

    def ask(self, endpoint, messages):
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions",
            json.dumps({"messages": messages}).encode(),
            {"authorization": f"Bearer {endpoint.api_key}"},
        )
        with urllib.request.urlopen(request) as answer:
            (choice,) = json.load(answer)["choices"]
        return choice
"""


def run(directory: Path, name: str, **environment: str) -> tuple[str, list[dict[str, Any]]]:
    """Runs a recipe for three deterministic steps; returns the hash of its weights, and metrics."""
    directory.mkdir()
    (directory / "agent.py").write_text(AGENT, encoding="utf-8")
    job = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    job["run"] |= {"steps": 3, "dir": "run", "deterministic": True}
    job["controller"]["config"] |= {"prompts": 8}
    job["evaluation"] |= {"every": 3, "prompts": 16}
    job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 150}
    job["environment"]["config"] |= environment
    del job["plugins"]
    text = yaml.safe_dump(job)
    for folder in ("quickstart", "calculator", "agent"):
        text = re.sub(rf" {folder}/", f" {RECIPES}/{folder}/", text)
    (directory / "job.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", "job.yaml"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(directory.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (directory / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return weights_sha256(directory / "run/weights"), [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where runs lie, and the weights of the same task as an environment."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run(folder / "calculator", "calculator")[0]


def test_both_doors_lead_to_one_record(calculator: tuple[Path, str]) -> None:
    """An agent over HTTP trains the same weights, bit for bit, as an environment that says the
    same.
    """
    folder, weights = calculator
    found, rows = run(folder / "program", "agent", environment="agent.py:Agent")
    assert found == weights
    assert 0.05 < rows[-1]["metrics"]["masked_share"] < 0.4


@pytest.mark.rest
def test_the_recipes_agent_trains_the_same_weights(calculator: tuple[Path, str]) -> None:
    folder, weights = calculator
    own = importlib.util.find_spec("openai")
    python = "" if own else str(peers.interpreter("openai", "openai==2.54.0"))
    assert run(folder / "recipe", "agent", python=python)[0] == weights


def test_the_job_differs_from_the_calculators_by_its_agent_alone() -> None:
    for plugin in ("gcore_report", "gcore_sentinel"):
        pytest.importorskip(plugin)
    agent, calculator = (load_plan(RECIPES / f"{name}.yaml") for name in ("agent", "calculator"))
    assert agent.at("environment.config.environment") == f"{RECIPES}/agent/agent.py:Agent"
    assert agent.at("environment.config.drift") == "error"
    for key in ("data", "rewards", "advantage", "objective", "roles"):
        assert agent.at(key) == calculator.at(key), key
