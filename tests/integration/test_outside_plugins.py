"""Five plugins written outside this repository and named in the quickstart's job: it runs as it
stands.

A placement policy, a balancer, a reward, an objective and a generator, a distribution each. The
generator samples from the pushed weights of the quickstart's own small Llama, so the run is the
real one: torch trains, GRPO, two controllers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from gcore_testing.installed import InstalledPlugins

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"

BALANCER = '''
"""Deals records in turn, and notes how many there were."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    note: str


class Turns:
    def __init__(self, config):
        self.note = config.note

    def costs(self, work):
        return work.lengths + work.extra

    def split(self, work, bins):
        with open(self.note, "a") as file:
            file.write(f"{len(work)} records\\n")
        return [list(range(len(work)))[start::bins] for start in range(bins)]


@hookimpl
def gcore_balancers():
    yield providers.BalancerProvider(summary="in turn", factory="gcore_turns:Turns", config=TurnsConfig)
'''  # noqa: E501

PLACEMENT = '''
"""Every role on the last devices; notes for which it decided."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers
from gcore_core.contract.errors import PlacementError
from gcore_core.contract.placement import Cell, Decision, Partition


@dataclass(frozen=True, kw_only=True)
class LastConfig:
    note: str


class Last:
    def __init__(self, config):
        self.note = config.note

    def revise(self, partition, window):
        if partition is not None:
            return Decision(partition=partition)
        cells = {}
        for role, slots in window.slots.items():
            if slots > len(window.devices):
                raise PlacementError("has too few devices", where=f"roles.{role}.slots", role=role)
            cells[role] = tuple(Cell((device,)) for device in window.devices[-slots:])
        with open(self.note, "a") as file:
            file.write(" ".join(sorted(cells)) + "\\n")
        return Decision(partition=Partition(cells))


@hookimpl
def gcore_placement_policies():
    yield providers.PlacementProvider(
        name="devices", summary="the last devices", factory="gcore_last:Last", config=LastConfig
    )
'''

REWARD = '''
"""Short answers are good."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers
from gcore_core.contract.scorer import Score


@dataclass(frozen=True, kw_only=True)
class ShortConfig:
    limit: int = 12


class Short:
    def __init__(self, config, context):
        self.limit = config.limit

    def score(self, records):
        return [Score(value=max(0.0, 1 - len(record.text) / self.limit)) for record in records]


@hookimpl
def gcore_rewards():
    yield providers.RewardProvider(summary="short answers", factory="gcore_short:Short", config=ShortConfig)
'''  # noqa: E501

OBJECTIVE = '''
"""REINFORCE; torch is imported by the trainer that runs it."""
from gcore_core import hookimpl
from gcore_core.contract import providers


class Reinforce:
    requires = frozenset()

    def __init__(self, config):
        pass

    def loss(self, columns, current):
        mask, weight = columns["mask"], self.weight(columns)
        total = -(columns["advantage"] * current["logp"])[mask].sum()
        return total, weight, {"outside": (weight.detach(), weight)}

    def weight(self, columns):
        return columns["mask"].sum().to(columns["rollout_logp"].dtype)


@hookimpl
def gcore_objectives():
    yield providers.ObjectiveProvider(summary="REINFORCE", factory="gcore_plain:Reinforce")
'''

GENERATOR = '''
"""The hooks of a generator; its engine needs torch and lies in a module of its own."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class SlowConfig:
    max_new_tokens: int = 14

    def traits(self):
        return Traits(receives_weights=True)


@hookimpl
def gcore_generators():
    yield providers.GeneratorProvider(
        summary="a whole forward pass for each token",
        factory="gcore_slow_engine:Slow",
        config=SlowConfig,
        needs=("torch>=2.6", "transformers>=4.50"),
    )
'''

ENGINE = '''
"""Samples from a Hugging Face model without a cache: samples of one length go through it together."""
from itertools import groupby

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.generator import Finished
from gcore_core.contract.records import FINISHED, TRUNCATED


class Sample:
    def __init__(self, request, prompt, version):
        self.request, self.prompt, self.version = request, prompt, version
        self.actions, self.logp = [], []


class Slow:
    def __init__(self, config, context):
        torch.set_num_threads(1)
        self.version = 0
        self.limit = config.max_new_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(context.model["path"])
        self.model = AutoModelForCausalLM.from_pretrained(context.model["path"], dtype=torch.float32).eval()
        self.tensors = self.model.state_dict()
        self.running = []

    def submit(self, requests):
        for request in requests:
            self.running.append(Sample(request, self.tokenizer(request.prompt.text).input_ids, self.version))

    def step(self):
        def length(sample):
            return len(sample.prompt) + len(sample.actions)

        for _, alike in groupby(sorted(self.running, key=length), key=length):
            self.advance(list(alike))
        ended = [sample for sample in self.running if self.is_done(sample)]
        self.running = [sample for sample in self.running if not self.is_done(sample)]
        return [self.finished(sample) for sample in ended]

    @torch.no_grad()
    def advance(self, samples):
        ids = torch.tensor([[*sample.prompt, *sample.actions] for sample in samples])
        logp = self.model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1).numpy()
        for sample, row in zip(samples, logp, strict=True):
            request, place = sample.request, len(sample.actions)
            noise = 0 if request.greedy else np.random.default_rng([request.seed, place]).gumbel(size=row.size)
            sample.actions.append(int((row + noise).argmax()))
            sample.logp.append(row[sample.actions[-1]])

    def is_done(self, sample):
        return sample.actions[-1] == self.tokenizer.eos_token_id or len(sample.actions) == self.limit

    def finished(self, sample):
        ended = sample.actions[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(sample.actions, skip_special_tokens=True)
        columns = {
            "prompt_ids": np.array(sample.prompt, np.int32),
            "action_ids": np.array(sample.actions, np.int32),
            "logp": np.array(sample.logp, np.float32),
            "action_mask": np.ones(len(sample.actions), np.uint8),
            "temperature": np.ones((), np.float32),
            "text": np.frombuffer(text.encode(), np.uint8),
        }
        status, versions = FINISHED if ended else TRUNCATED, (sample.version, self.version)
        return Finished(request=sample.request, status=status, versions=versions, columns=columns)

    def abort(self, keys):
        raise NotImplementedError("samples cannot be ended early")

    def begin_weights(self, plan):
        for spec in plan.tensors:
            if spec.name not in self.tensors or tuple(self.tensors[spec.name].shape) != spec.shape:
                raise WeightMismatch("the push is of another model", where=f"tensor {spec.name!r}")

    def load_weights(self, tensors):
        for spec, array in tensors:
            new = torch.from_numpy(array.view(np.float32).reshape(spec.shape).copy())
            self.tensors[spec.name].copy_(new)

    def commit_weights(self, plan):
        self.version = plan.version

    def close(self):
        pass
'''  # noqa: E501

#: plugin -> modules of its distribution
PLUGINS = {
    "turns": {"gcore_turns": BALANCER},
    "last": {"gcore_last": PLACEMENT},
    "short": {"gcore_short": REWARD},
    "plain": {"gcore_plain": OBJECTIVE},
    "slow": {"gcore_slow": GENERATOR, "gcore_slow_engine": ENGINE},
}


def fabricated(directory: Path) -> tuple[Path, str]:
    """(interpreter, PYTHONPATH): this interpreter, and metadata and modules as pip would have
    written them.
    """
    installed = InstalledPlugins(directory / "installed")
    for name, modules in PLUGINS.items():
        files = {f"{module}.py": source for module, source in modules.items()}
        installed.add(name, modules[f"gcore_{name}"], files=files)
    return Path(sys.executable), os.pathsep.join((str(installed.directory), str(REPOSITORY)))


def by_pip(directory: Path) -> tuple[Path, str]:
    """(interpreter, PYTHONPATH): an environment of its own with the five, which sees what is
    installed here as well.
    """
    root = directory / "venv"
    venv.create(root, with_pip=True, symlinks=True)
    (site,) = root.glob("lib/python3*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    # As lines of code: a plain path would not have its own .pth files read, and these hold the
    # editable installs.
    (site / "here.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in here)
    )
    projects = [
        write_project(directory / f"gcore-{name}", name, modules)
        for name, modules in PLUGINS.items()
    ]
    python = root / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, *projects], check=True, env=environment)
    return python, str(REPOSITORY)


def write_project(directory: Path, name: str, modules: dict[str, str]) -> Path:
    directory.mkdir()
    for module, source in modules.items():
        (directory / f"{module}.py").write_text(source)
    text = f"""
        [build-system]
        requires = ["setuptools>=77"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "gcore-{name}"
        version = "0.1.0"
        dependencies = ["gcore-core>=0.3,<0.4"]
        [project.entry-points.gcore]
        {name} = "gcore_{name}"
        [tool.setuptools]
        py-modules = {json.dumps([*modules])}
        """
    (directory / "pyproject.toml").write_text(textwrap.dedent(text))
    return directory


def write_job(directory: Path) -> None:
    """The quickstart's job, shorter, with the five in the place of its own; the observer needs
    matplotlib.
    """
    job = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    job["run"] |= {"steps": 2, "dir": str(directory / "run")}
    job["evaluation"] |= {"every": 0, "prompts": 8}
    job["controller"]["config"]["prompts"] = 4
    job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 20}
    del job["plugins"]
    job["placement"] = {"use": "last/devices", "config": {"note": str(directory / "placed.txt")}}
    job["balance"] = {"use": "turns", "config": {"note": str(directory / "balanced.txt")}}
    job["objective"] = {"use": "plain"}
    job["rewards"] = {
        "short": {"use": "short", "config": {"limit": 20}},
        "exact": job["rewards"]["exact"],
    }
    job["roles"]["rollout"] |= {"use": "slow", "config": {"max_new_tokens": 6}}
    text = yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
    (directory / "job.yaml").write_text(text)


@pytest.mark.protects
@pytest.mark.parametrize("install", [fabricated, pytest.param(by_pip, marks=pytest.mark.slow)])
def test_plugins_from_outside_run_the_quickstart_when_it_names_them(
    install: Callable[[Path], tuple[Path, str]], tmp_path: Path
) -> None:
    for name in ("gcore_torch", "gcore_algorithms", "transformers"):
        pytest.importorskip(name)
    python, path = install(tmp_path)
    write_job(tmp_path)
    cache = tmp_path / "cache"
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "G_CORE_CACHE": str(cache),
    }

    def g_core(*words: str) -> str:
        done = subprocess.run(
            [python, "-m", "gcore_core", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    listed = {line.split()[0]: line.split()[1] for line in g_core("plugins").splitlines()[1:]}
    assert {name: listed.get(name) for name in PLUGINS} == dict.fromkeys(PLUGINS, "ok")
    with tempfile.TemporaryDirectory(
        prefix="gc-", dir="/tmp"
    ) as sockets:  # socket paths must be short
        g_core("run", "job.yaml", f"launcher.config.socket_dir={sockets}")

    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    metrics = [{**row, **row["metrics"]} for row in rows]
    assert [row["step"] for row in metrics] == [0, 1, 2]
    first, *steps = metrics
    assert "sampled/short" in first["evaluation"], "the reward"
    for row in steps:
        assert 0 < row["reward/short"] < 1, "the reward"
        assert row["outside"] == 1, "the objective"
        assert 0 < row["length"] <= 6, "the generator, with its setting"
        assert row["logprob_gap_max"] < 1e-4, (
            "the generator, with the weights pushed after each step"
        )
    assert (tmp_path / "balanced.txt").read_text() == "16 records\n" * 4, (
        "the balancer: 2 steps of 2 minibatches"
    )
    assert (tmp_path / "placed.txt").read_text() == "policy rollout\n", "the placement policy"
