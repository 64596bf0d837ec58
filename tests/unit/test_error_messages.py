"""What the user reads when something is wrong: every message whole, as it stands in
error_messages.json.

The site's page of errors is made of the same file. After a message has changed on purpose, write
it again:

    G_CORE_WRITE=1 python -m pytest tests/unit/test_error_messages.py
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import BuiltinImporter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gcore_nodes.identity import make_identity
from gcore_nodes.joined_disks import no_directory
from gcore_nodes.provide_files import refusal
from gcore_testing import fake
from gcore_testing.installed import InstalledPlugins, Wheel, empty_venv

from gcore_core import cli
from gcore_core.config import catalog, venvs
from gcore_core.config.interpreters import differences, open_interpreter, unmet_needs
from gcore_core.config.plan import Plan, load_plan
from gcore_core.config.plugins import Plugins, local_plugin, observer_failure
from gcore_core.contract.errors import GcoreError, error_types
from gcore_core.contract.factories import FactorySpec, build, import_attribute
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.launching import ALIVE, FoundNodes, NodeFacts
from gcore_core.contract.lineage import check_receipt, check_seal
from gcore_core.contract.placement import Device
from gcore_core.contract.records import Header, Prompt, RunFacts, StepReport
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.contract.sentinel import Alarm
from gcore_core.contract.site_files import JobFiles
from gcore_core.contract.step_check import mismatch
from gcore_core.contract.trainer import TrainRecord
from gcore_core.controllers.generation.dispatch import Round, check_repeats, check_versions
from gcore_core.controllers.training import check_row, masked_share
from gcore_core.node import handshake
from gcore_core.node.launchers import InlineLauncher
from gcore_core.run import directory as run_directory
from gcore_core.run import start
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints
from gcore_core.run.machines import place_run
from gcore_core.run.saved_weights import weights_sha256
from gcore_core.run.worker_exits import Restarts
from gcore_core.runtime.main_thread import ThreadedLimits
from gcore_core.runtime.messages import TrainReply, Versions, WorkerExit
from gcore_core.wire import sockets, tls
from gcore_core.wire.service import Service
from gcore_core.workers.checked_rewards import KnownRow, check_known
from gcore_core.workers.drawn_records import EndReasons
from gcore_core.workers.opened_records import check_duplicates, check_prompts
from gcore_core.workers.row_digest import open_row
from gcore_core.workers.weights_follower import weights_gone
from tests.support import api_messages, made_pages, plugin_messages

ROOT = Path(__file__).parents[2]
MESSAGES = Path(__file__).with_name("error_messages.json")
MOST_LINES = 6

_KNOWN = KnownRow(
    line=4,
    record=ScoredRecord(
        ordinal=-4,
        sample=3,
        prompt=Prompt(row=3, text="12+7="),
        text="It is 19.",
        status="finished",
        columns={},
    ),
    reward=1.0,
)


async def _always_zero(records: list[ScoredRecord]) -> list[Score]:
    return [Score(value=0.0)] * len(records)


def _raise_at(where: str, error: GcoreError) -> None:
    error.where = where
    raise error


def _finished(action_ids: list[int]) -> Finished:
    request = SampleRequest(ordinal=12, sample=3, seed=0, prompt=Prompt(row=7, text=""))
    columns = {"action_ids": np.array(action_ids, np.int32)}
    return Finished(request=request, status="finished", versions=(0, 0), columns=columns)


JOB = """\
run: {name: job}
launcher: {use: core/inline}
data: {use: fake}
advantage: {use: fake}
objective: {use: fake}
roles:
  policy: {use: fake}
  rollout: {use: fake}
rewards:
  letters: {use: fake}
"""
HEAD = "from gcore_core import hookimpl\nfrom gcore_core.contract import providers as p\n"
FILTER = (
    "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='-', "
    "factory={factory!r}{more})\n"
)


class World:
    """A directory with a job, and installed plugins around it."""

    def __init__(self, directory: Path, installed: InstalledPlugins) -> None:
        self.directory, self.installed = directory, installed
        installed.add("fake", "from gcore_testing.fake import *\n")

    def limit_in_a_thread(self) -> None:
        """Has a reward divide its work over threads, as one does that hides errors of each part."""
        file = self.directory / "grade.py"
        file.write_text("import signal\n\ndef ring():\n    signal.signal(signal.SIGALRM, print)\n")
        ring = runpy.run_path(str(file))["ring"]
        limits = ThreadedLimits()
        with limits.noticed(), ThreadPoolExecutor(1, "graders") as threads:
            assert isinstance(threads.submit(ring).exception(), ValueError)
        limits.check("rewards.right")

    def supervise_in_a_thread(self) -> None:
        """Begins a run as a server might, which answers requests in threads."""
        with ThreadPoolExecutor(1, "requests") as threads:
            threads.submit(partial(start.run_file, self.directory / "job.yaml")).result()

    def load(self, *overrides: str, text: str = JOB) -> Plan:
        """Reads the job as ``g-core check`` does."""
        file = self.directory / "job.yaml"
        file.write_text(text)
        return load_plan(file, overrides)

    def plugin(self, source: str, name: str = "mine", wheel: Wheel | None = None) -> None:
        """Installs a plugin and names it in the job."""
        self.installed.add(name, HEAD + source, wheel)
        self.load(f"plugins=[{name}]")

    def python(self, *plugins: tuple[str, Wheel]) -> str:
        """The interpreter of a virtual environment with these plugins."""
        root = self.directory / "envs" / "a"
        site = empty_venv(root)
        for name, wheel in plugins:
            site.add(name, wheel=wheel)
        return str(root / "bin" / "python")

    def role(self, *plugins: tuple[str, Wheel], version: str = "1.3.0") -> None:
        """Compares this core, and a plugin vllm of a version, with another interpreter."""
        interpreter = open_interpreter(self.python(*plugins), where="")
        wrong = differences(
            interpreter,
            {"gcore-vllm": version} if len(plugins) > 1 else {},
            where="roles.rollout.python",
        )
        raise next(wrong)

    def needs(self, need: str) -> None:
        raise next(
            unmet_needs(
                open_interpreter(self.python(), where=""),
                "gcore-vllm 1.3.0",
                [need],
                where="roles.rollout.use",
            )
        )

    def venv(self, python: str) -> None:
        """Looks into one of two named venvs: vllm, with an older core, and sglang, which is
        half made.
        """
        root = Path(
            self.python(("core", Wheel(distribution="gcore-core", version="0.0.9")))
        ).parents[2]
        (root / "a").rename(root / "vllm")
        (root / "sglang").mkdir()
        for name in ("vllm", "sglang"):
            told = {"plugin": name, "complete": name == "vllm"}
            (root / name / venvs.RECORD).write_text(json.dumps(told))
        raise next(
            differences(
                open_interpreter(python, where="roles.rollout.python"),
                {},
                where="roles.rollout.python",
            )
        )

    def command(self, *words: str) -> None:
        cli._dispatch(list(words), owns_process=False)

    def run(self, *overrides: str) -> None:
        (self.directory / "job.yaml").write_text(JOB)
        start.run_file(self.directory / "job.yaml", ["run.steps=1", *overrides])

    def data(self, use: str, content: str | None, **settings: Any) -> None:
        """Opens the job's data and reads a row."""
        if content is not None:
            (self.directory / "rows.jsonl").write_text(content)
        given = json.dumps({"path": "rows.jsonl", **settings})
        build(self.load(f"data.use={use}", f"data.config={given}").factory("data"))[0]


def machines_left(world: World) -> None:
    """A run that goes on finds one machine of two."""

    class Launcher(InlineLauncher):
        async def find_nodes(self, devices: Any, *, again: bool) -> FoundNodes:
            device = Device(index=0, kind="cpu")
            ssh = "the command ended with 255: ssh: connect to host node2 port 22: No route to host"
            return FoundNodes(
                nodes=[NodeFacts(name="agent.0", devices=(device,), host="node1")],
                missing={"node2": ssh},
            )

    async def pause(seconds: float) -> None:
        clock.append(clock[-1] + seconds)

    clock = [0.0]
    plan = world.load("roles.policy.slots=2")
    placing = place_run(
        plan, Launcher(), lambda text: None, again=True, pause=pause, clock=lambda: clock[-1]
    )
    asyncio.run(placing)


def acts(world: World, *overrides: str) -> None:
    """Reads a job whose policy acts in an environment; its generator takes prompts as texts."""
    world.installed.add(
        "games",
        HEAD + "@hookimpl\ndef gcore_environments():\n"
        "    yield p.EnvironmentProvider(summary='-', factory='gcore_games:Games')\n"
        "@hookimpl\ndef gcore_generators():\n"
        "    yield p.GeneratorProvider(summary='-', factory='gcore_games:Engine')\n",
    )
    world.load("environment.use=games", "roles.rollout.use=games", *overrides)


CASES: dict[str, dict[str, Callable[[World], object]]] = {
    "Configuration": {
        "no such file": lambda w: load_plan(w.directory / "jbo.yaml"),
        "not YAML": lambda w: w.load(text=JOB + "filter: {use: core/varied\n"),
        "no mapping": lambda w: w.load(text="- run\n"),
        "role's key that is gone": lambda w: w.load("roles.rollout.lent=1"),
        "unknown key": lambda w: w.load("run.stepz=3"),
        "key that is gone": lambda w: w.load("controller.config.push_delta=auto"),
        "section that is gone": lambda w: w.load("sampling={use: refine}"),
        "wrong type": lambda w: w.load("run.steps=many"),
        "key of a role that is gone": lambda w: w.load("roles.rollout.lent=1"),
        "wrong container": lambda w: w.load("run=[3]"),
        "unknown setting of a plugin": lambda w: w.load("roles.rollout.config.max_token=3"),
        "wrong type of a plugin's setting": lambda w: w.load(
            "roles.rollout.config.max_new_tokens=many"
        ),
        "settings where there are none": lambda w: w.load("filter.config.x=1"),
        "setting that another provider has": lambda w: w.load(
            "sentinel.use=core/band", "sentinel.config.canaries=1"
        ),
        "override without a value": lambda w: w.load("run.steps"),
        "something is missing": lambda w: w.load(text="run: {steps: 3}\n"),
        "a value out of range": lambda w: w.load("run.steps=0"),
        "several problems": lambda w: w.load(
            "run.steps=0", "controller.shards=0", "roles.policy.slots=0"
        ),
        "misspelt role": lambda w: w.load("roles.juge.use=fake"),
        "misspelt provider": lambda w: w.load("filter.use=core/variedd"),
        "provider of another kind": lambda w: w.load("placement.use=fake"),
        "environment that is not there": lambda w: w.load("environment.use=fake/nowhere"),
        "environment without a name": lambda w: w.load("environment.config.turns=3"),
        "environment around a generator that takes no tokens": lambda w: acts(w),
        "follows nobody": lambda w: w.load("roles.rollout.follows=polizy"),
        "unknown key asked for": lambda w: w.load().why("run.stepz"),
        "local file is missing": lambda w: w.load("local=[rewards.py]"),
        "run directory in use": lambda w: used_twice(w.directory / "mine"),
        "does not fit": lambda w: w.run("cluster.devices=1", "roles.rollout.slots=2"),
        "push that the trainer cannot make": lambda w: w.run(
            "controller.config.push_transport=ipc"
        ),
        "several ranks in one process": lambda w: w.run(
            "cluster.devices=2", "roles.policy.slots=2"
        ),
        "own interpreter in one process": lambda w: w.run(f"roles.rollout.python={linked(w)}"),
        "files that differ on other machines": lambda w: refuse_files(w, "copy"),
        "files that other machines do not have": lambda w: refuse_files(w, "check"),
        "no directory of the run on another machine": lambda w: refuse_directory(w),
    },
    "Plugins": {
        "not installed": lambda w: w.load("roles.rollout.use=fkae"),
        "name of a distribution without such a plugin": lambda w: w.load(
            "roles.policy.use=testing"
        ),
        "deleted": lambda w: catalog.scan([str(w.directory)]).get("tree", where="plugins"),
        "disabled": lambda w: disabled(w),
        "two plugins of one name": lambda w: (
            w.installed.add("twin", "", Wheel(version="1.3.0")),
            w.plugin(
                "",
                "twin",
                Wheel(distribution="gcore-twin-fork", version="0.1", module="gcore_fork"),
            ),
        ),
        "plugin for a newer core": lambda w: w.plugin(
            "", wheel=Wheel(requires=["gcore-core>=7,<8"])
        ),
        "plugin for an older core": lambda w: w.plugin(
            "", wheel=Wheel(requires=["gcore-core<0.1"])
        ),
        "another version is asked for": lambda w: w.load("plugins.fake='>=2'"),
        "not a version": lambda w: w.load("plugins.fake=newest"),
        "local file named as an installed plugin": lambda w: (
            (w.directory / "fake.py").touch(),
            w.load("local=[fake.py]"),
        ),
        "does not import": lambda w: w.plugin("import jinja9\n"),
        "hook that is gone": lambda w: w.plugin(
            "@hookimpl\ndef gcore_samplers():\n    return []\n"
        ),
        "misspelt hook": lambda w: w.plugin("@hookimpl\ndef gcore_filterz():\n    return []\n"),
        "hook that is not marked": lambda w: w.plugin("def gcore_filters():\n    return []\n"),
        "hook with an unknown argument": lambda w: w.plugin(
            "@hookimpl\ndef gcore_run_end(run, err):\n    pass\n"
        ),
        "hook argument with a default": lambda w: w.plugin(
            "@hookimpl\ndef gcore_run_end(run, error=''):\n    pass\n"
        ),
        "hook that asks for an order": lambda w: w.plugin(
            "@hookimpl(tryfirst=True)\ndef gcore_run_end(run):\n    pass\n"
        ),
        "hook that raises": lambda w: w.plugin(
            "@hookimpl\ndef gcore_filters():\n    raise ValueError('no')\n"
        ),
        "hook that yields something else": lambda w: w.plugin(
            "@hookimpl\ndef gcore_filters():\n    yield 5\n"
        ),
        "invalid description": lambda w: w.plugin(
            FILTER.format(factory="nowhere", more=", name='A B'")
        ),
        "one name twice": lambda w: w.plugin(
            "@hookimpl\ndef gcore_filters():\n    return [p.FilterProvider(summary='-', "
            "factory='a:b')] * 2\n"
        ),
        "config class that is no schema": lambda w: (
            w.installed.add(
                "mine",
                HEAD
                + "from dataclasses import dataclass\n@dataclass\nclass C:\n    x: set\n"
                + FILTER.format(factory="gcore_mine:C", more=", config=C"),
            ),
            w.load("filter.use=mine"),
        ),
        "factory that does not import": lambda w: import_attribute(
            "gcore_no_engine.engine:Generator"
        ),
        "factory that is not there": lambda w: import_attribute(
            "gcore_core.builtin.filters:KeepAl"
        ),
        "factory that cannot be called": lambda w: build(
            FactorySpec("gcore_core.builtin.filters:__name__")
        ),
        "observer that raises each step": lambda w: observer(w),
        "neither verb nor plugin": lambda w: w.command("rnu"),
        "plugin without commands that is not installed": lambda w: cli._refuse_missing_plugin(
            "trackers", ()
        ),
        "no such command of a plugin": lambda w: w.command("fake", "greet"),
        "no such template": lambda w: w.command("new", "mine", "--kind", "balncer"),
    },
    "Interpreters": {
        "no such interpreter": lambda w: open_interpreter(
            "/envs/a/bin/python", where="roles.rollout.python"
        ),
        "not executable": lambda w: open_interpreter(__file__, where="roles.rollout.python"),
        "cannot be started": lambda w: unstartable(w),
        "no core there": lambda w: w.role(),
        "another core there": lambda w: w.role(
            ("core", Wheel(distribution="gcore-core", version="0.0.9"))
        ),
        "another version of a plugin there": lambda w: w.role(
            ("core", Wheel(distribution="gcore-core", version="0.3.0")),
            ("vllm", Wheel(version="1.2.0")),
        ),
        "engine is missing there": lambda w: w.needs("vllm>=0.30"),
        "no such venv": lambda w: w.venv("venv:vlm"),
        "venv that is half made": lambda w: w.venv("venv:sglang"),
        "nothing that makes venvs": lambda w: without_maker(w),
        "venv with another version": lambda w: w.venv("venv:vllm"),
        "no description of a venv": lambda w: w.command("venv", "create", "fake"),
        "venv that pip does not make": lambda w: unmakable(w),
        "worker and supervisor differ": lambda w: handshake.agree(
            "rollout.0",
            worker=Versions("/envs/a/bin/python", "0.3.0", {"gcore-vllm": "1.2.0"}),
            supervisor=Versions("/envs/main/bin/python", "0.3.0", {"gcore-vllm": "1.3.0"}),
        ),
    },
    "Data": {
        "no such data": lambda w: w.data("core/jsonl", None),
        "no rows": lambda w: w.data("core/jsonl", ""),
        "not JSON": lambda w: w.data("core/jsonl", "{'prompt': 1}\n"),
        "no such field": lambda w: w.data("core/jsonl", '{"question": "1+1="}\n'),
        "rows that differ between processes": lambda w: open_row(
            Header(ordinal=0, sample=0, row=17, seed=0, prompt_digest=7),
            fake.FakeDataset(fake.FakeDataConfig()),
            "mine/shuffled",
            "data",
        ),
        "no run to export": lambda w: w.command(
            "export", str(w.directory / "runs" / "x"), "--to", str(w.directory / "to")
        ),
        "no weights to hash": lambda w: weights_sha256(w.directory),
    },
    "Training": {
        "a record that is another": lambda w: check_seal(
            1, 12, 3, 0, {"action_ids": np.zeros(3, np.int32)}, "opening for step 4"
        ),
        "rewards of another record": lambda w: check_receipt(
            1, 2, 12, 3, {"exact": 1.0}, "advantages of shard 0"
        ),
        "a record of another row": lambda w: check_row(
            Header(ordinal=12, sample=3, row=7, seed=0), 10, 0, "advantages of shard 0"
        ),
        "two prompts in a group": lambda w: check_prompts(
            [
                TrainRecord(
                    ordinal=12,
                    sample=sample,
                    minibatch=0,
                    columns={"prompt_ids": np.array([sample], np.int32)},
                )
                for sample in (0, 3)
            ],
            "opening for step 4",
        ),
        "equal samples": lambda w: check_duplicates(
            [
                TrainRecord(
                    ordinal=ordinal,
                    sample=sample,
                    minibatch=0,
                    columns={
                        "action_ids": np.arange(20, dtype=np.int32),
                        "logp": np.full(20, -2.0, np.float32),
                    },
                )
                for ordinal in range(12, 20)
                for sample in range(2)
            ],
            "step 3",
        ),
        "a version that is behind": lambda w: check_versions(
            [Header(ordinal=12, sample=3, row=7, seed=0, versions=(2, 2), stamp=1, replica=1)],
            Round(version=3, number=0, purpose="train"),
            "rollout.1",
        ),
        "weights that are gone": lambda w: _raise_at("rollout.1", weights_gone(3, 4)),
        "newer weights in a run that repeats": lambda w: check_repeats(
            [Header(ordinal=12, sample=3, row=7, seed=0, versions=(4, 4), stamp=1, replica=1)],
            Round(version=3, number=0, purpose="train"),
            "rollout.1",
        ),
        "answers that were cut off": lambda w: EndReasons().add(
            _finished([7] * n + [last])
            for n, last in [(1, 2)] * 8 + [(5, 10 + i) for i in range(20)]
        ),
        "a known reward": lambda w: asyncio.run(
            check_known("exact", "known.jsonl", [_KNOWN], _always_zero)
        ),
        "a time limit in a thread": lambda w: w.limit_in_a_thread(),
        "no trained action": lambda w: masked_share(3, [TrainReply({}, 4, 0.0, 0, 512)]),
        "wrong log-probs of one replica": lambda w: alarmed(),
    },
    "Checkpoints": {
        "no checkpoints": lambda w: w.command("checkpoint", "verify", str(w.directory)),
        "no whole checkpoint": lambda w: damaged(w).open(),
        "checkpoint of another version": lambda w: saved_by_another(w),
        "damaged checkpoint": lambda w: damaged(w).open(10),
        "full disk": lambda w: without_room(w),
    },
    "Processes": {
        "a run in a thread": lambda w: w.supervise_in_a_thread(),
        "address in use": lambda w: taken(),
        "address that others can reach": lambda w: sockets.check_free("tcp:0.0.0.0:5000"),
        "address of every network": lambda w: sockets.check_free("tls:0.0.0.0:5000", b"PEM"),
        "TLS without a certificate": lambda w: sockets.check_free("tls:127.0.0.1:5000"),
        "address of another machine": lambda w: sockets.check_free("tls:192.0.2.7:5000", b"PEM"),
        "malformed identity": lambda w: tls.contexts(b"PEM"),
        "another run's certificate": lambda w: asyncio.run(another_run()),
        "no package for TLS": lambda w: without_cryptography(),
        "socket path too long": lambda w: sockets.check_free("unix:/" + "x" * 120),
        "started again in vain": lambda w: started_in_vain(),
        "too few machines are left": machines_left,
    },
    **plugin_messages.CASES,
    **api_messages.CASES,
}


def started_in_vain() -> None:
    """Ends a generator until its supervisor has seen enough."""
    tail = "Loading weights: 100%\nCUDA error: an illegal memory access was encountered\n"
    exited = WorkerExit("rollout.0", 4711, -9, True, tail)
    restarts = Restarts()
    log_file = Path("runs/job/001/logs/rollout.0.log")
    for _ in range(100):
        if error := restarts.ended(exited, "ended with signal SIGKILL", log_file):
            raise error


async def another_run() -> None:
    """Calls a process that has the certificate of another run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        addresses = {"agent.1": f"tls:127.0.0.1:{probe.getsockname()[1]}"}
    networks = [sockets.RpcNetwork(addresses, b"s", identity=make_identity()) for _ in "12"]
    try:
        await networks[0].serve("agent.1", Service("agent.1"))
        await networks[1].peer("agent.1").call(ALIVE, None)
    finally:
        for network in networks:
            await network.close()


def without_cryptography() -> None:
    """As where only the core is installed: the interpreter finds no module of the package."""
    with (
        mock.patch.object(sys, "meta_path", [BuiltinImporter]),
        mock.patch.dict(sys.modules),
    ):
        for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
            del sys.modules[name]
        make_identity()


def alarmed() -> None:
    alarm = Alarm(
        replica=1,
        since_step=3,
        actions=376,
        text=(
            "gaps of unsure actions exceed the healthy 0.99 quantile too often: log e 21.6 after "
            "376 actions, the alarm is at 19.5"
        ),
    )
    raise mismatch(
        4,
        [alarm],
        {(1, 4): np.zeros(1)},
        ["rollout.0", "rollout.1"],
        saves=True,
        cause=(
            "weights",
            "cause: rollout.1 holds other bytes than were pushed in 1 of 21 tensors: "
            "lm_head.weight",
        ),
    )


def used_twice(directory: Path) -> None:
    run_directory.write_config(run_directory.create(directory.parent, "job", str(directory)), "{}")
    run_directory.create(directory.parent, "job", str(directory))


def linked(world: World) -> str:
    """An interpreter that is another file than the one which runs, and has the core."""
    return world.python(
        ("core", Wheel(distribution="gcore-core", version="0.3.0")),
        ("fake", Wheel()),
    )


def unstartable(world: World) -> None:
    python = world.directory / "python"
    python.write_text("#!/no/such/shell\n")
    python.chmod(0o755)
    open_interpreter(str(python), where="roles.rollout.python")


def disabled(world: World) -> None:
    os.environ["G_CORE_PLUGINS"] = "off"
    try:
        world.load()
    finally:
        del os.environ["G_CORE_PLUGINS"]


def observer(world: World) -> None:
    """The one report that a run prints of an observer which raises at every step."""
    file = world.directory / "mine.py"
    file.write_text(
        HEAD + "@hookimpl\ndef gcore_step_end(report):\n    raise ValueError('no disk')\n"
    )
    plugins, reported = Plugins(), []
    plugins.load(local_plugin(file))
    observers = plugins.observers(lambda *told: reported.append(told))
    for step in (1, 2, 3):
        observers.step_end(
            RunFacts(name="job", directory="", steps=3, config={}),
            StepReport(step=step, version=step, metrics={}),
        )
    (told,) = reported
    raise observer_failure(*told, "its traceback: runs/job/001/logs/supervisor.log")


def without_maker(world: World) -> None:
    """A named venv is missing, and the plugin that makes venvs is not installed."""
    with mock.patch.object(venvs, "distributions", return_value=[]):
        world.venv("venv:vlm")


def unmakable(world: World) -> None:
    """With an interpreter whose pip knows no index."""
    world.plugin(
        "@hookimpl\ndef gcore_venvs():\n    yield p.VenvProvider(name='cpu', "
        "summary='-', engine='e')\n"
    )
    python = world.directory / "python"
    pip = "#!/bin/sh\necho 'ERROR: No matching distribution found for gcore-core==0.3.0'; exit 1\n"
    python.write_text(
        f"#!/bin/sh\nmkdir $3/bin; printf %s {shlex.quote(pip)} >$3/bin/python; chmod +x "
        "$3/bin/python\n"
    )
    python.chmod(0o755)
    world.command("venv", "create", "mine", "--python", str(python))


def refuse_files(world: World, mode: str) -> None:
    faults = [f"node{number}: /data/train.jsonl: is missing" for number in range(5)]
    if mode == "copy":
        faults = ["node1: /data/train.jsonl: differs: 15 bytes, at home 7"]
    job = JobFiles(paths={}, may_copy=mode == "copy", log=Path("runs/job/001/logs/supervisor.log"))
    raise refusal(faults, job)


def refuse_directory(world: World) -> None:
    what = "it cannot be made: Permission denied"
    raise no_directory("node1", world.directory / "runs/job/001", what)


def saved_by_another(world: World) -> None:
    """A run that 0.2 saved, and whose job has a key that is gone, is to go on."""
    checkpoints = Checkpoints(world.directory)
    (checkpoints.begin(10) / "state.json").write_text("{}")
    checkpoints.commit(10, CheckpointFacts(run="job", lock={"gcore-core": "0.2.0"}))
    (world.directory / "config.yaml").write_text(JOB + "sentinel: {canaries: 3}\n")
    world.command("resume", str(world.directory))


def damaged(world: World) -> Checkpoints:
    """One of two lacks a part, the other has other bytes."""
    checkpoints = Checkpoints(world.directory)
    for step in (10, 20):
        (checkpoints.begin(step) / "ledger.json").write_text("{}")
        (checkpoints.commit(step, CheckpointFacts(run="job")) / "ledger.json").write_text("[]")
    (checkpoints.directory / "step-000020" / "ledger.json").unlink()
    return checkpoints


def without_room(world: World) -> None:
    """The system says so when the manifest is written."""
    checkpoints = Checkpoints(world.directory)
    (checkpoints.begin(10) / "ledger.json").write_text("{}")
    checkpoints.commit(10, CheckpointFacts(run="job"))
    (checkpoints.begin(20) / "ledger.json").write_text("{}")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("gcore_core.run.checkpoints.write_durably", side_effect=full):
        checkpoints.commit(20, CheckpointFacts(run="job"))


def taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        sockets.check_free(f"tcp:127.0.0.1:{other.getsockname()[1]}")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> case -> what was raised."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for section, cases in CASES.items():
        for name, provoke in cases.items():
            directory = tmp_path_factory.mktemp("jobs")
            with (
                pytest.MonkeyPatch.context() as patch,
                InstalledPlugins(directory / "site") as installed,
            ):
                patch.chdir(directory)
                patch.delenv("G_CORE_PLUGINS", raising=False)
                patch.setenv("G_CORE_VENVS", str(directory / "envs"))
                world = World(directory, installed)
                with pytest.raises(GcoreError) as caught:
                    provoke(world)
            error = caught.value
            found.setdefault(section, {})[name] = {
                "class": type(error).__name__,
                "exit_code": error.exit_code,
                "message": normal(str(error), directory).splitlines(),
            }
    if os.environ.get("G_CORE_WRITE"):
        MESSAGES.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def normal(text: str, directory: Path) -> str:
    """The message as it would read in one directory, with one interpreter, whatever else is
    installed.
    """
    text = text.replace(str(directory), "/jobs").replace(sys.executable, "/envs/main/bin/python")
    text = text.replace(str(Path(__file__)), "/envs/a/bin/activate").replace(str(ROOT), "/g-core")
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:5000", text)
    return re.sub(
        r"(  installed: )[^()]*?( \(|$)", r"\1core, fake, ...\2", text, flags=re.MULTILINE
    )


def saved() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(MESSAGES.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section, cases in CASES.items() for name in cases]
)
def test_every_message_equals_its_golden(
    found: dict[str, dict[str, dict[str, Any]]], section: str, name: str
) -> None:
    assert found[section][name] == saved()[section][name]


def test_every_golden_message_is_raised_by_a_case() -> None:
    assert {s: list(cases) for s, cases in saved().items()} == {
        s: list(cases) for s, cases in CASES.items()
    }


def test_every_message_is_short_and_starts_with_the_problem(
    found: dict[str, dict[str, dict[str, Any]]],
) -> None:
    for cases in found.values():
        for name, told in cases.items():
            first, *rest = told["message"]
            assert len(told["message"]) <= MOST_LINES, name
            assert not first.startswith(" ") and all(line.startswith("  ") for line in rest), name


def test_every_class_of_configuration_and_plugin_errors_has_a_message() -> None:
    told = {case["class"] for cases in saved().values() for case in cases.values()}
    expected = {
        "ConfigError",
        "RunExists",
        "PlacementError",
        "PluginNotFound",
        "PluginClash",
        "PluginBroken",
    }
    assert expected | {"PluginIncompatible", "ContractError", "DataError", "AddressError"} <= told
    assert told <= set(error_types())


def test_the_page_of_errors_shows_every_message_word_for_word() -> None:
    page = made_pages.page("reference/errors.md")
    for cases in saved().values():
        for name, told in cases.items():
            text = "\n".join(told["message"])
            head = f"### {name[0].upper()}{name[1:]}\n\n`{told['class']}`, exit code"
            assert f"{head} {told['exit_code']}\n\n```text\n{text}\n```\n" in page, name
