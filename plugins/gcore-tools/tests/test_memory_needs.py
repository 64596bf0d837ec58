"""What a job needs on each device in each phase, and when it is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_testing import fake
from gcore_tools.plan.memory_fit import check_memory
from gcore_tools.plan.memory_needs import GIB, MemoryNeeds, Pool, _shape, memory_needs
from gcore_tools.plan.step_seconds import expected_seconds

from gcore_core.cli import main
from gcore_core.config.plan import load_plan
from gcore_core.contract.engine_profiles import EngineFit, Profile
from gcore_core.contract.errors import ContractError, PlacementError
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.memory import MemoryNeed
from gcore_core.contract.placement import Device
from gcore_core.contract.run_files import Measured
from gcore_core.kits.models import make_model, models_cache
from gcore_core.kits.planning import place
from tests.support import sized

JOB = {
    "run": {"name": "sized"},
    "local": [fake.__file__, sized.__file__],
    "data": {"use": "fake"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "sized"}, "rollout": {"use": "sized"}},
    "rewards": {"letters": {"use": "fake"}},
}


#: An evaluation on 20 prompts.
EVALUATED = ["evaluation.every=1", "evaluation.prompts=20", "evaluation.data={use: fake}"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(JOB))
    return file


def machine(devices: int, gib: int, kind: str = "cuda", host: int = 0) -> list[NodeFacts]:
    found = tuple(Device(index=index, kind=kind) for index in range(devices))
    sizes: dict[str, Any] = {"device_bytes": gib * GIB, "host_bytes": host * GIB}
    return [NodeFacts(name="agent.0", devices=found, host="node 0", **sizes)]


def counted(job: Path, nodes: list[NodeFacts], *overrides: str) -> MemoryNeeds:
    plan = load_plan(job, overrides)
    return memory_needs(plan, place(plan, nodes), {})


def gib(needs: MemoryNeeds, device: int) -> dict[str, float]:
    pool = Pool("agent.0", device)
    return {phase: needs.total(pool, phase) / GIB for phase in needs.held[pool]}


def test_roles_that_share_a_device_need_the_sum_of_what_is_awake(job: Path) -> None:
    needs = counted(job, machine(1, 80), "roles.policy.config.activations=5")
    assert gib(needs, 0) == {"rollout": 16, "preparation": 8, "training": 13, "push": 16}


def test_a_generator_that_sleeps_in_training_leaves_only_what_it_keeps_on_the_host(
    job: Path,
) -> None:
    needs = counted(job, machine(1, 80), "roles.rollout.config.kept=3")
    assert gib(needs, -1) == {"rollout": 0, "preparation": 3, "training": 3, "push": 0}


def test_a_trainer_that_sleeps_in_the_rollout_leaves_only_what_it_keeps_on_the_host(
    job: Path,
) -> None:
    asleep = "placement.sleep_in_rollout=always"
    needs = counted(job, machine(1, 80), asleep, "roles.policy.config.kept=3")
    assert gib(needs, 0) == {"rollout": 8, "preparation": 8, "training": 8, "push": 16}
    assert gib(needs, -1)["rollout"] == 3
    silent = counted(job, machine(1, 80), asleep, "roles.policy.config.kept=-1")
    assert gib(silent, 0)["rollout"] == 16, "nobody says what it keeps, so it is counted awake"


def test_on_cpus_all_workers_of_a_machine_share_its_memory(job: Path) -> None:
    nodes = machine(4, 0, "cpu", host=64)
    needs = counted(job, nodes, "roles.policy.slots=2", "roles.rollout.slots=2")
    assert gib(needs, -1) == {"rollout": 16, "preparation": 16, "training": 16, "push": 16}
    assert needs.there == {Pool("agent.0"): 64 * GIB}


def test_a_role_whose_backend_says_nothing_is_named_and_not_counted_as_nothing(job: Path) -> None:
    needs = counted(job, machine(1, 80), "roles.rollout.use=fake")
    assert list(needs.silent) == ["rollout"]
    assert "does not say" in needs.silent["rollout"]


def test_a_part_that_a_backend_does_not_know_is_named_with_the_reason(job: Path) -> None:
    needs = counted(job, machine(1, 80), "roles.rollout.config.fault=unknown")
    assert needs.silent == {"rollout": "cache: takes what is free"}


def test_backends_are_told_how_many_records_a_step_and_an_update_have(job: Path) -> None:
    plan = load_plan(
        job, ["controller.config.prompts=6", "controller.config.minibatches=3", *EVALUATED]
    )
    told = {role: _shape(plan, role, "cpu", {"prompt_tokens": 5}) for role in ("policy", "rollout")}
    group = told["policy"].group_size
    assert (told["policy"].records, told["policy"].minibatches) == (6 * group, 3)
    assert told["rollout"].records == max(20, 6 * group), "an evaluation draws of 20 prompts"
    assert told["policy"].facts == {"prompt_tokens": 5}
    assert not told["rollout"].acts
    around = replace(plan, provided={**plan.provided, "environment": plan.provided["data"]})
    acts = {role: _shape(around, role, "cpu", {}).acts for role in told}
    assert acts == {"policy": False, "rollout": True}, "an environment asks the policy's generator"
    filtered = load_plan(job, ["filter.use=core/varied"])
    assert _shape(filtered, "rollout", "cpu", {}).records == 0, "a filter may have more drawn"


def test_a_backend_is_told_what_a_push_may_go_through(job: Path) -> None:
    plain, pushing = "controller.config.prompts=1", "roles.policy.config.fault=pushes"
    before = gib(counted(job, machine(1, 80), plain), 0)["push"]
    assert gib(counted(job, machine(1, 80), pushing), 0)["push"] == before + 0.25
    more = f"controller.config.push_bucket_bytes={3 * GIB}"
    assert gib(counted(job, machine(1, 80), pushing, more), 0)["push"] == before + 3


def test_a_model_that_a_run_has_made_before_is_known(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "teach.py").write_text(
        "def teach(directory, config, progress): (directory / 'config.json').write_text('{}')"
    )
    make = {"path": str(tmp_path / "teach.py"), "name": "teach", "config": {}}
    override = f"roles.policy.model.make={json.dumps(make)}"
    assert "it is made first" in counted(job, machine(1, 80), override).silent["policy"]
    make_model(make, models_cache(), lambda share, text: None)
    assert counted(job, machine(1, 80), override).silent == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "needs failed: KeyError: 'hidden'"),
        ("phase", "phase 'lunch' is none of rollout"),
        ("word", "'much' is no need"),
    ],
)
def test_an_answer_that_is_none_names_the_plugin(job: Path, fault: str, words: str) -> None:
    with pytest.raises(ContractError, match=words) as caught:
        counted(job, machine(1, 80), f"roles.policy.config.fault={fault}")
    assert caught.value.where == "roles.policy.use"


def test_what_cannot_fit_is_refused_with_role_device_phase_bytes_and_what_would_fit(
    job: Path,
) -> None:
    nodes = machine(4, 12)
    plan = load_plan(job, ["roles.policy.config.weights=20"])
    with pytest.raises(PlacementError) as caught:
        check_memory(plan, place(plan, nodes), nodes, ["roles.policy.config.weights=20"])
    error = caught.value
    assert error.where == "roles.policy"
    assert "needs 20.0 GiB in rollout on device 0 of node 0, which has 12.0" in error.what
    assert error.facts["changes"] == [["roles.policy.slots=2"]]
    assert "roles.policy.slots=2 fits: 10.0 of 12.0 GiB" in error.todo


def test_settings_are_changed_together_where_none_is_enough_alone(job: Path) -> None:
    nodes = machine(8, 6)
    overrides = ["roles.policy.config.weights=40"]
    plan = load_plan(job, [*overrides, "roles.rollout.config.weights=1"])
    with pytest.raises(PlacementError) as caught:
        check_memory(
            plan, place(plan, nodes), nodes, [*overrides, "roles.rollout.config.weights=1"]
        )
    assert caught.value.facts["changes"] == [["roles.policy.slots=8"]]


def test_what_is_too_large_only_in_a_full_step_is_noted_and_not_refused(job: Path) -> None:
    nodes = machine(2, 12)
    overrides = ["roles.policy.config.activations=9"]
    plan = load_plan(job, overrides)
    (note,) = check_memory(plan, place(plan, nodes), nodes, overrides)
    assert "device 0 of node 0 may be too small: full steps need 17.0 GiB in training" in note


def test_devices_of_unknown_size_refuse_nothing(job: Path) -> None:
    nodes = machine(1, 0)
    plan = load_plan(job, ["roles.policy.config.weights=4000"])
    assert check_memory(plan, place(plan, nodes), nodes) == []


def test_the_size_of_a_device_may_be_given_in_the_job(job: Path) -> None:
    nodes = machine(1, 0)
    plan = load_plan(job, ["cluster.device_gib=10"])
    with pytest.raises(PlacementError, match=r"needs 16\.0 GiB"):
        check_memory(plan, place(plan, nodes), nodes)


@pytest.mark.parametrize(
    ("need", "problem"),
    [
        (MemoryNeed(phase="training", what="", nbytes=1), "what: says nothing"),
        (MemoryNeed(phase="training", what="x", nbytes=-1), "x: nbytes is -1"),
        (MemoryNeed(phase="training", what="x", nbytes=None), "no note says why"),
        (MemoryNeed(phase="training", what="x", nbytes=1, on="disk"), "neither"),  # type: ignore[arg-type]
    ],
)
def test_a_need_says_what_is_wrong_with_it(need: MemoryNeed, problem: str) -> None:
    assert problem in need.problems()[0]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_each_phase_and_says_that_it_fits(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "--devices", "2", "--device-gib", "20"]) == 0
    printed = capsys.readouterr().out
    assert "device 0 of node 0\n" in printed
    assert re.search(r"training +policy +weights +8\.00 +rows\n", printed)
    assert "expected seconds of a step: not measured" in printed
    assert printed.rstrip().endswith("fits")


def test_the_command_says_what_is_too_small_and_which_setting_is_enough(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(job), "roles.policy.config.activations=9"]
    assert main([*words, "--devices", "2", "--device-gib", "12"]) == 1
    printed = capsys.readouterr().out
    assert "too small: device 0 of node 0: training needs 17.0 GiB in a full step" in printed
    assert "roles.policy.config.activations=4 fits: 12.0 of 12.0 GiB" in printed


def test_the_command_gives_the_same_as_one_object(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "--json", "--devices", "2", "--device-gib", "20"]) == 0
    told = json.loads(capsys.readouterr().out)
    first = next(pool for pool in told["pools"] if pool["device"] == 0)
    assert first["there"] == 20 * GIB
    assert first["phases"]["training"]["needed"] == 8 * GIB


def test_a_job_that_check_refuses_is_planned_and_it_is_said(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its data may not be there yet; but then less is counted than for the same job with them."""
    words = ["data={use: core/jsonl, config: {path: none.jsonl}}", "--devices", "2"]
    assert main(["plan", str(job), *words, "--device-gib", "20"]) == 0
    told = capsys.readouterr()
    assert "g-core check refuses this job: " in told.err and "none.jsonl" in told.err
    assert told.out.rstrip().endswith("fits")


def test_a_job_without_its_known_rewards_is_planned_on_this_machine(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "rewards.letters.known=none.jsonl"]) in (0, 1)  # it may be small
    told = capsys.readouterr()
    assert "g-core check refuses this job: " in told.err and "none.jsonl" in told.err
    assert "memory of this machine" in told.out


@pytest.mark.parametrize("option", ["--devices=0", "--device-gib=-1", "--nodes=0", "--host-gib=0"])
def test_a_machine_of_no_size_is_refused(
    job: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option] if option.startswith("--devices") else ["--devices=1", option]
    assert main(["plan", str(job), *options]) == 2
    assert f"{option.partition('=')[0]}: must be positive" in capsys.readouterr().err


def test_the_memory_on_the_command_line_wins_over_the_job_s(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(job), "cluster.device_gib=4", "roles.policy.config.activations=9"]
    assert main([*words, "--devices", "2", "--device-gib", "20"]) == 0
    assert "of 20.00" in capsys.readouterr().out
    assert main([*words, "--devices", "2", "--device-gib", "12"]) == 1
    assert "roles.policy.config.activations=4 fits: 12.0 of 12.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--device-gib=80", "--nodes=2", "--host-gib=500"])
def test_a_size_of_machines_without_their_devices_is_refused(
    job: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), option]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"{option.partition('=')[0]}: is a size of machines")
    assert "add --devices N" in printed


def test_a_run_that_has_measured_nothing_is_refused_by_name(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "--devices=1", f"--measured={tmp_path}"]) == 4
    assert "the run has no record of placement decisions" in capsys.readouterr().err


def test_seconds_come_from_the_profile_that_an_earlier_run_has_fitted(
    job: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "sized" / "001"
    run.mkdir(parents=True)
    profile = Profile(base_s=0.1, running_s=0.0, cached_s=0.0, max_running=10)
    fit = EngineFit(profile=profile, requests=40)
    outcome = Measured(
        step=1, measured_s=9.0, training_s=4.0, pushing_s=0.5, engines={"rollout": fit}
    )
    (run / "placement.jsonl").write_bytes(msgspec.json.encode(outcome) + b"\n")
    numbers = {"length": 20.0, "actions": 2000.0}
    row = {"step": 1, "version": 1, "time_unix_s": 0.0, "metrics": numbers}
    (run / "metrics.jsonl").write_bytes(msgspec.json.encode(row) + b"\n")
    (run / "config.yaml").write_text("roles: {policy: {slots: 1}, rollout: {slots: 1}}")
    plan = load_plan(job, ["roles.rollout.slots=2"])
    placed = place(plan, machine(3, 80))
    rollout, training, push = expected_seconds(plan, placed, run)
    # 100 records of 20 rounds of 0.1 s, ten at a time, over two replicas
    assert rollout.startswith("rollout: 10 s, by the profile of ")
    assert training.startswith("training: 4 s, measured in ")
    assert push.startswith("push: 0.5 s, measured in ")
    more = load_plan(job, ["roles.policy.slots=2"])
    assert expected_seconds(more, placed, run)[1] == "training: not measured on 2 slots"


def test_check_and_run_refuse_what_cannot_fit_before_anything_is_made(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("check", "run"):
        assert main([verb, str(job), "roles.policy.config.weights=100000"]) == 2
        assert "roles.policy: needs " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
