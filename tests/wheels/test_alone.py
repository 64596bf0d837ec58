"""Each distribution runs where nothing is installed but its wheel and what that declares.

A new environment has the wheel, the distributions that its smallest job names, and what these
declare (``tests.support.wheels``); where that job is one of fakes, the test kit, too. The job runs
with one slot and, where the distribution has slots, with two. What needs torch is slow, but for
README's own job. Engines have environments of their own (``tests/engines/suites.py``); here they
say what is missing.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import tomllib
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.support.wheels import REPOSITORY, make_venv, projects, run_outside

JOBS = Path(__file__).with_name("alone")
FAKES = "fakes.yaml"
MODELS = "models.yaml"
TORCH = ("gcore-torch", "gcore-algorithms")
RUN = "runs/alone/001"
POLICY = "roles.policy.slots=2"
ROLLOUT = "roles.rollout.slots=2"
MODEL = "{make: {path: functions.py, name: make}}"
ROWS = "{use: core/jsonl, config: {path: rows.jsonl}}"
#: A judge who says a letter, and what it is worth.
JUDGE = (
    "roles.judge={use: fake}",
    "rewards.judged={use: genrm, role: judge}",
    "rewards.judged.config={form: text, template: '{completion}', accept_truncated: true}",
    "rewards.judged.config.parser.pattern=(?P<score>[a-h.])",
    "rewards.judged.config.parser.choices={a: 1, b: 1, c: 1, d: 0, e: 0, f: 0, g: 0, h: 0, .: 0}",
)


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What a distribution does where it is alone.

    name: the distribution, with its extras where what it does needs them.
    plugin: whose job it is, where the distribution brings several; "": that of its own name.
    also: other distributions that the job names.
    job: a file of the folder ``alone``; "": it runs none.
    settings: overrides of the job.
    two: those that give it two slots besides; empty: it has no slots.
    commands: what runs behind the job, each as arguments of the interpreter.
    lacks: what ``g-core check`` says of the job, which cannot run here; "": it can.
    code: the exit code of ``g-core check``.
    is_slow: whether only the nightly tests run it.
    """

    name: str
    plugin: str = ""
    also: tuple[str, ...] = ()
    job: str = FAKES
    settings: tuple[str, ...] = ()
    two: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    lacks: str = ""
    code: int = 0
    is_slow: bool = False


def fakes(name: str, *settings: str, plugin: str = "", two: tuple[str, ...] = ()) -> Alone:
    """One whose job has no model."""
    return Alone(name=name, plugin=plugin, settings=settings, two=two)


def models(
    name: str,
    *settings: str,
    plugin: str = "",
    two: tuple[str, ...] = (),
    commands: tuple[tuple[str, ...], ...] = (),
    is_slow: bool = True,
) -> Alone:
    """One whose job trains a model with torch."""
    also = tuple(other for other in TORCH if other != name.partition("[")[0])
    return Alone(
        name=name,
        plugin=plugin,
        also=also,
        job=MODELS,
        settings=settings,
        two=two,
        commands=commands,
        is_slow=is_slow,
    )


def commands(name: str, *words: tuple[str, ...], plugin: str = "", is_slow: bool = False) -> Alone:
    """One that is used by commands, or imported."""
    return Alone(name=name, plugin=plugin, job="", commands=words, is_slow=is_slow)


def lacking(name: str, setting: str, lacks: str, *, plugin: str = "", code: int) -> Alone:
    """One whose engine is not installed with it."""
    return Alone(name=name, plugin=plugin, settings=(setting,), lacks=lacks, code=code)


def g_core(*words: str) -> tuple[str, ...]:
    """A command, as arguments of the interpreter."""
    return ("-m", "gcore_core", *words)


CASES = (
    fakes("gcore-core", two=(POLICY, ROLLOUT)),
    fakes(
        "gcore-algorithms",
        "advantage={use: algorithms/grpo, config: {group_size: 4}}",
        two=(POLICY, ROLLOUT),
    ),
    models("gcore-async", "controller={use: async, config: {prompts: 4}}", two=(POLICY, ROLLOUT)),
    fakes("gcore-placement", "balance={use: balance}", plugin="balance", two=(POLICY,)),
    models(
        "gcore-language[models]", POLICY, "roles.policy.config.context={ring: 2}", plugin="context"
    ),
    commands("gcore-language", ("-c", "import gcore_language.context.settings"), plugin="context"),
    models(
        "gcore-algorithms",
        "advantage={use: algorithms/gae, config: {group_size: 4}}",
        "roles.critic={use: torch, config: {learning_rate: 1e-3}}",
        "plugins=[critic]",
        plugin="critic",
        two=(POLICY, "roles.critic.slots=2"),
    ),
    fakes("gcore-data", "data={use: data/parquet, config: {path: rows.parquet}}"),
    fakes("gcore-data[hub]", "data={use: data/hub, config: {path: rows.jsonl}}"),
    lacking("gcore-deepspeed", "roles.policy.use=deepspeed", "pip install 'deepspeed", code=3),
    Alone(
        name="gcore-diffusion",
        also=("gcore-algorithms",),
        job=MODELS,
        settings=(
            "roles.policy.use=diffusion",
            "roles.policy.model.make.name=draw",
            "roles.rollout={use: diffusion, config: {steps: 4}}",
            "rewards={bright: {use: diffusion/brightness}}",
        ),
        two=(POLICY, ROLLOUT),
        is_slow=True,
    ),
    models(
        "gcore-environments",
        "environment={use: environments, config: {environment: 'game.py:Twice', turn_tokens: 4}}",
        "rewards={said: {use: environments, config: {name: said}}}",
        two=(POLICY, ROLLOUT),
    ),
    models(
        "gcore-report[eval]",
        plugin="eval",
        commands=(g_core("eval", RUN, "--task", "tasks.py@sums", "--max-tokens", "4"),),
    ),
    fakes("gcore-rewards", *JUDGE, plugin="genrm", two=("roles.judge.slots=2",)),
    Alone(
        name="gcore-rewards[human]",
        plugin="human",
        settings=("evaluation={every: 1, show: 4}", f"evaluation.data={ROWS}"),
        commands=(("rate.py", RUN),),
    ),
    commands("gcore-tools[jobs]", ("train.py",), plugin="jobs", is_slow=True),
    commands("gcore-language", ("-c", "import gcore_language.lora_settings")),
    lacking("gcore-megatron", "roles.policy.use=megatron", "pip install 'megatron-core", code=3),
    fakes(
        "gcore-nodes",
        "launcher={use: nodes/command, config: {devices: 6}}",
        "launcher.config.command=env HOST={host}",
        "launcher.config.hosts=[HERE]",
    ),
    Alone(
        name="gcore-algorithms",
        plugin="offline",
        also=("gcore-torch",),
        job="offline.yaml",
        two=(POLICY,),
        is_slow=True,
    ),
    Alone(
        name="gcore-placement",
        also=("gcore-rewards",),
        settings=(*JUDGE, "placement={use: placement/split}"),
        two=(ROLLOUT, "roles.judge.slots=2"),
    ),
    commands(
        "gcore-placement",
        ("-c", "import gcore_placement.queueing.step"),
        plugin="queueing",
        is_slow=True,
    ),
    lacking("gcore-nodes", "launcher.use=ray", "pip install 'ray", plugin="ray", code=3),
    Alone(
        name="gcore-report",
        settings=("plugins=[report]",),
        commands=(
            g_core("report", RUN),
            g_core("diff", RUN, RUN),
            g_core("trace", RUN),
            g_core("logs", RUN),
            g_core("watch", "--help"),
        ),
    ),
    fakes("gcore-rewards", "rewards.same={use: rewards/exact-match}"),
    fakes("gcore-sentinel", "sentinel={use: sentinel}", two=(POLICY, ROLLOUT)),
    lacking("gcore-sglang", "roles.rollout.use=sglang", "g-core venv create sglang", code=2),
    models(
        "gcore-tools", plugin="shrink", commands=(g_core("shrink", MODELS, "-o", "small.yaml"),)
    ),
    fakes(
        "gcore-placement[sim]",
        "launcher={use: sim/crowd, config: {processes: 1}}",
        "data={use: sim/prompts, config: {kind: chat}}",
        "objective={use: sim}",
        "roles.policy={use: sim, config: {time_scale: 0}}",
        "roles.rollout={use: sim, config: {time_scale: 0}}",
        "rewards={judged: {use: sim/judge, config: {time_scale: 0}}}",
        plugin="sim",
        two=(POLICY, ROLLOUT),
    ),
    models(
        "gcore-algorithms[teacher]",
        f"roles.teacher={{use: teacher, model: {MODEL}, config: {{top_k: 4}}}}",
        "objective={use: teacher/jsd, config: {beta: 0.5}}",
        "advantage={use: teacher/no-reward, config: {group_size: 4}}",
        plugin="teacher",
        two=(POLICY, "roles.teacher.slots=2"),
    ),
    commands(
        "gcore-testing",
        ("-m", "pytest", "-q", "contract.py"),
        g_core("new", "mine", "--kind", "reward"),
        g_core("conformance", "core"),
        g_core("plugins", "show", "core"),
        g_core("plugins", "check", "core"),
        plugin="conformance",
    ),
    models("gcore-torch", two=(POLICY, ROLLOUT), is_slow=False),
    lacking(
        "gcore-report",
        "observers.tracked={use: trackers/mlflow, config: {project: alone}}",
        "mlflow",
        plugin="trackers",
        code=2,
    ),
    commands(
        "gcore-placement",
        g_core("simulate", "--devices", "16", "--steps", "2", "--workload", "steady"),
        plugin="simulate",
    ),
    Alone(
        name="gcore-tools",
        plugin="checkpoint",
        settings=("checkpoint={every: 1}",),
        commands=(
            g_core("checkpoint", "list", RUN),
            g_core("hash", RUN),
            g_core("export", RUN, "--to", "weights"),
        ),
    ),
    commands("gcore-tools", g_core("recipes"), plugin="recipes"),
    commands("gcore-tools", g_core("venv", "list"), plugin="venv"),
    commands("gcore-tools", g_core("plan", FAKES), plugin="plan"),
    commands("gcore-tools", g_core("doctor", "--json"), plugin="doctor"),
    commands(
        "gcore-tools",
        g_core("demo", "--recipe", FAKES, "--steps", "8", "--kills", "1"),
        plugin="demo",
        is_slow=True,
    ),
    commands("gcore-tools[completion]", g_core("completion", "bash"), plugin="completion"),
    lacking("gcore-vllm", "roles.rollout.use=vllm", "g-core venv create vllm", code=2),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the jobs and their files, and nothing of the checkout."""
    shutil.copytree(JOBS, tmp_path / "jobs")
    rows = [json.loads(line) for line in (JOBS / "rows.jsonl").read_text().splitlines()]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "jobs/rows.parquet")
    return tmp_path / "jobs"


def here() -> str:
    """An address of this machine at which others could reach it."""
    addresses = (address for found in psutil.net_if_addrs().values() for address in found)
    return next(
        address.address
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.plugin or case.name, marks=[pytest.mark.slow] * case.is_slow)
        for case in CASES
    ],
)
def test_a_distribution_runs_with_what_it_declares(
    case: Alone, wheels: Path, folder: Path, tmp_path: Path
) -> None:
    named = {case.job, *(word for words in case.commands for word in words)}
    kit = ("gcore-testing",) if FAKES in named else ()  # it has the fakes
    python = make_venv(tmp_path / "venv", wheels, [case.name, *case.also, *kit]) / "python"
    job = [case.job, *(setting.replace("HERE", here()) for setting in case.settings)]
    listing = run_outside(python, *g_core("plugins"), directory=folder)
    for name in plugins_of(case.name):
        assert re.search(rf"^{name} +ok +{case.name.partition('[')[0]} ", listing, re.M), listing
    if case.lacks:
        said = run_outside(python, *g_core("check", *job), directory=folder, code=case.code)
        assert case.lacks in said and "Traceback" not in said
        return
    if case.job:
        run_outside(python, *g_core("run", *job), directory=folder)
    for words in case.commands:
        run_outside(python, *words, directory=folder)
    if case.two:
        run_outside(python, *g_core("run", *job, *case.two), directory=folder)


def test_every_distribution_and_every_plugin_is_tried_alone() -> None:
    names = {name_of(project) for project in projects()}
    assert {case.name.partition("[")[0] for case in CASES} == names
    tried = {case.plugin or case.name.removeprefix("gcore-") for case in CASES}
    commands = (words for case in CASES for words in case.commands)
    tried |= {words[2] for words in commands if words[:2] == g_core()}
    assert {plugin for name in names for plugin in plugins_of(name)} - tried == set()


def name_of(project: Path) -> str:
    """The name of the distribution of a folder."""
    return "gcore-core" if project == REPOSITORY else project.name


def plugins_of(name: str) -> list[str]:
    """The plugins of a distribution, with extras or without, as its project says."""
    (project,) = (one for one in projects() if name_of(one) == name.partition("[")[0])
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"].get("entry-points", {})
    return sorted(points.get("gcore", {}))
