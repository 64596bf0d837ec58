"""A role and a step program, both of a plugin written outside this repository, in the quickstart.

The role gives a column; the program is a thin one on the public kit; torch trains on two shards.
What the processes write down is compared with what a run records, and the loss with float64.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gcore_testing.installed import InstalledPlugins

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"
STEPS = 2

HOOKS = '''
"""A teacher, a loss that draws the policy to it, and a step program."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers
from gcore_core.contract.traits import Traits
from gcore_core.controllers.config import SyncConfig


@dataclass(frozen=True, kw_only=True)
class NoteConfig:
    note: str


@dataclass(frozen=True, kw_only=True)
class TowardConfig:
    weight: float

    def traits(self) -> Traits:
        return Traits(requires=frozenset({"teacher_logp"}))


@dataclass(frozen=True, kw_only=True)
class ThinConfig(SyncConfig):
    note: str = ""


@hookimpl
def gcore_roles():
    yield providers.RoleProvider(
        name="teacher", summary="-", kind="annotator", columns=("teacher_logp",)
    )


@hookimpl
def gcore_annotators():
    yield providers.AnnotatorProvider(
        summary="-", factory="gcore_school_teacher:Teacher", config=NoteConfig
    )


@hookimpl
def gcore_objectives():
    yield providers.ObjectiveProvider(
        summary="-", factory="gcore_school_loss:Toward", config=TowardConfig
    )


@hookimpl
def gcore_controllers():
    verbs = {
        "trainer": {"prepare", "train", "push"},
        "generator": {"generate", "push"},
        "annotator": {"annotate"},
        "scorer": {"score"},
    }
    yield providers.ControllerProvider(
        summary="-",
        factory="gcore_school_thin:Thin",
        config=ThinConfig,
        calls={kind: frozenset(own) for kind, own in verbs.items()},
    )
'''

TEACHER = '''
"""Says of each action what follows from the token alone, and writes down what it was shown."""
import json
import os

import numpy as np


class Teacher:
    def __init__(self, config, context):
        self.version = 0
        self.note, self.columns = config.note, context.columns

    def annotate(self, records):
        rows, given = [], []
        for record in records:
            ids = record.columns["action_ids"]
            logp = -(ids % 5 + 1).astype(np.float32) / 4
            given.append(dict.fromkeys(self.columns, logp))
            own = {name: record.columns[name].tolist() for name in ("logp", "action_mask")}
            own |= {"key": [record.ordinal, record.sample], "ids": ids.tolist(), "pid": os.getpid()}
            rows.append(json.dumps(own))
        with open(self.note, "a") as file:
            file.write("".join(row + "\\n" for row in rows))
        return given

    def close(self):
        pass
'''

LOSS = '''
"""REINFORCE, and the square of the distance to the teacher."""


class Toward:
    def __init__(self, config):
        self.factor = config.weight
        self.requires = frozenset({"teacher_logp"})

    def loss(self, columns, current):
        apart = current["logp"] - columns["teacher_logp"]
        terms = self.factor / 2 * apart * apart - columns["advantage"] * current["logp"]
        return terms[columns["mask"]].sum(), self.weight(columns), {}

    def weight(self, columns):
        return columns["mask"].sum().float()
'''

THIN = '''
"""One step after the other, without checkpoints or evaluation; writes down what it trained on."""
import json
import os

from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.publishing import Publishing
from gcore_core.controllers.reporting import Reporting
from gcore_core.controllers.training import Training
from gcore_core.controllers.generation import Producer


class Thin:
    def __init__(self, config, context):
        self.note, self.facts = config.note, context.facts
        self.placement = PlacementShard(context)
        self.producer = Producer(context, config, self.placement)
        self.training = Training(context, config)
        self.publishing = Publishing(context, config, self.placement)
        self.reporting = Reporting(context)

    async def run(self):
        await self.placement.decide(0, 0)
        await self.publishing.publish(0, 0)
        await self.reporting.begin(0, None)
        for step in range(self.facts.run.steps):
            await self.step(step)

    async def step(self, step):
        taken = await self.producer.take(step)
        plan = await self.training.balance(step, taken.groups)
        scalars = await self.training.prepare(step, taken.groups, plan)
        advantages = await self.training.advantages(taken.groups, scalars)
        rows = [[step, os.getpid(), *key, value] for key, value in advantages.items()]
        with open(f"{self.note}.{self.facts.shard}", "a") as file:
            file.write("".join(json.dumps(row) + "\\n" for row in rows))
        trained = await self.training.train(step, advantages, plan)
        await self.publishing.publish(step + 1, taken.oldest)
        verdicts = self.producer.note_published(taken)
        summary = self.reporting.summary(taken.groups, taken.counts, verdicts, None)
        await self.reporting.end(step + 1, summary, trained, self.producer.state()["ledger"])
'''

MODULES = {
    "gcore_school_teacher.py": TEACHER,
    "gcore_school_loss.py": LOSS,
    "gcore_school_thin.py": THIN,
}


def write_job(directory: Path) -> None:
    """The quickstart's job, shorter, with the plugin's role, objective and program."""
    job = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    job["run"] |= {"steps": STEPS, "dir": str(directory / "run")}
    job["evaluation"] |= {"every": 0, "prompts": 8}
    job["controller"] |= {"use": "school"}
    job["controller"]["config"] = {
        "prompts": 4,
        "minibatches": 1,
        "note": str(directory / "trained"),
    }
    job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 20}
    job["roles"]["teacher"] = {
        "use": "school",
        "slots": 2,
        "config": {"note": str(directory / "shown")},
    }
    job["objective"] = {"use": "school", "config": {"weight": 0.5}}
    del job["plugins"]
    text = yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
    (directory / "job.yaml").write_text(text)


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def reference_loss(
    shown: list[dict[str, Any]], advantages: dict[tuple[int, int], float], factor: float
) -> float:
    """The objective in float64, from what the teacher was shown and what the program computed."""
    total = weight = 0.0
    for record in shown:
        mask = np.array(record["action_mask"]) != 0
        logp = np.array(record["logp"], np.float64)[mask]
        teacher = -(np.array(record["ids"])[mask] % 5 + 1) / 4.0
        total += factor / 2 * float(np.square(logp - teacher).sum())
        total -= advantages[tuple(record["key"])] * float(logp.sum())
        weight += len(logp)
    return total / weight


def test_a_role_and_a_program_from_outside_are_both_called(tmp_path: Path) -> None:
    for name in ("gcore_torch", "gcore_algorithms", "transformers"):
        pytest.importorskip(name)
    installed = InstalledPlugins(tmp_path / "installed")
    installed.add("school", HOOKS, files=MODULES)
    write_job(tmp_path)
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as sockets:
        done = subprocess.run(
            [sys.executable, "-m", "gcore_core", "run", "job.yaml"]
            + [f"launcher.config.socket_dir={sockets}"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(installed.directory), str(REPOSITORY))),
                "OMP_NUM_THREADS": "1",
                "G_CORE_CACHE": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    log = (tmp_path / "run/logs/agent.0.log").read_text()
    started = dict(re.findall(r"INFO (\S+) is started, pid (\d+)", log))
    pids = {name: int(pid) for name, pid in started.items()}
    shown = lines(tmp_path / "shown")
    trained = [lines(tmp_path / f"trained.{shard}") for shard in range(2)]

    teachers = {pids["teacher.0"], pids["teacher.1"]}
    assert {record["pid"] for record in shown} == teachers, "each in a process of its own"
    for shard, rows in enumerate(trained):
        assert {row[1] for row in rows} == {pids[f"controller.{shard}"]}
    assert len(set(pids.values())) == len(pids)

    everything = [row for rows in trained for row in rows]
    keys = [tuple(record["key"]) for record in shown]
    assert sorted(keys) == sorted((row[2], row[3]) for row in everything), "each once"
    assert sorted({key[0] for key in keys}) == list(range(4 * STEPS))

    metrics = [{**row, **row["metrics"]} for row in lines(tmp_path / "run/metrics.jsonl")]
    for step in range(STEPS):
        advantages = {(row[2], row[3]): row[4] for row in everything if row[0] == step}
        own = [record for record in shown if tuple(record["key"]) in advantages]
        expected = reference_loss(own, advantages, 0.5)
        assert metrics[step + 1]["loss"] == pytest.approx(expected, abs=2e-5)
        assert abs(expected - reference_loss(own, advantages, 0.0)) > 0.1, "by the column"
