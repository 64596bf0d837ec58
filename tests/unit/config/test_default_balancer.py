"""A job that names no balancer gets the one that its policy needs, and is told which."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from gcore_core import cli
from gcore_core.config import catalog
from gcore_core.config.plan import load_plan
from gcore_core.contract.installing import install_command
from gcore_core.run.display import open_display
from gcore_core.run.start import Start, prepare
from tests.support import runs

Job = Callable[..., Path]
ONE_SLOT = "roles.policy.slots=1"


def chosen(file: Path, *overrides: str) -> str:
    return load_plan(file, list(overrides)).provided["balance"].reference


class WithoutBalance(catalog.Catalog):
    """What is installed, less the plugin ``balance``."""

    def __init__(self) -> None:
        scanned = catalog.scan()
        rows = [row for row in scanned._rows if row.plugin.name != "balance"]
        super().__init__(rows, scanned._core_version, disabled=False)


def test_a_policy_on_several_slots_is_balanced_by_learned_cost(job: Job) -> None:
    plan = load_plan(job())
    assert plan.provided["balance"].reference == "balance"
    assert plan.config["balance"]["config"]["learn"] is True
    assert (
        plan.why("balance.use") == 'balance.use = "balance"  # auto: the policy has several slots'
    )


def test_a_policy_on_one_slot_has_nothing_to_balance(job: Job) -> None:
    plan = load_plan(job(), [ONE_SLOT])
    assert plan.provided["balance"].reference == "core/in-order"
    assert not [note for note in plan.notes if "balance" in note]


def test_slots_that_refer_to_another_key_count_as_what_it_holds(job: Job) -> None:
    assert chosen(job(), "roles.policy.slots=${run.steps}", "run.steps=1") == "core/in-order"
    assert chosen(job(), "roles.policy.slots=${run.steps}", "run.steps=3") == "balance"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_balancer_that_is_named_is_taken(job: Job, slots: int) -> None:
    overrides = ("balance.use=balance/snake", f"roles.policy.slots={slots}")
    assert chosen(job(), *overrides) == "balance/snake"


def test_settings_without_a_name_are_those_of_the_balancer_that_is_taken(job: Job) -> None:
    plan = load_plan(job(), ["balance.config.hidden_size=128"])
    assert plan.config["balance"]["config"]["hidden_size"] == 128


def test_records_are_dealt_in_order_where_the_plugin_is_not_installed_and_check_says_so(
    job: Job,
) -> None:
    plan = load_plan(job(), installed=WithoutBalance())
    assert plan.provided["balance"].reference == "core/in-order"
    command = install_command("gcore-placement")
    assert plan.notes[0].endswith(
        f"since plugin balance is not installed or may not be used ({command})"
    )


def test_check_names_the_balancer_and_whether_runs_repeat(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*overrides: str) -> str:
        assert cli.main(["check", str(job()), "cluster.devices=4", *overrides]) == 0
        return capsys.readouterr().out

    assert (
        "it learns costs from measured seconds, so two runs may differ in the last bits" in told()
    )
    assert "it learns no costs, since run.deterministic is true" in told("run.deterministic=true")
    assert "learn" not in told(ONE_SLOT)


def test_a_run_that_is_resumed_keeps_the_balancer_that_it_began_with(job: Job) -> None:
    """Its configuration names it, whatever the policy's slots are then."""
    use = load_plan(job()).config["balance"]["use"]
    assert chosen(job(), f"balance.use={use}", ONE_SLOT) == "balance"


@pytest.mark.parametrize(("slots", "told"), [(2, "balance.use is balance"), (1, "")])
def test_a_run_says_at_its_start_which_balancer_it_has_and_what_would_change_it(
    slots: int, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    roles = {"policy": {"use": "fake", "slots": slots}, "rollout": {"use": "fake"}}
    job = runs.job(roles=roles, cluster={"devices": 2}) | {"local": [str(runs.FAKE)]}
    file.write_text(json.dumps(job))
    begun = Start(file=file, overrides=[f"run.dir={tmp_path / 'run'}"])
    stream = io.StringIO()
    with ExitStack() as until_end:
        prepare(begun, lambda steps: open_display(steps, stream), until_end=until_end)
    notes = [line for line in stream.getvalue().splitlines() if "balance.use" in line]
    assert len(notes) == bool(told)
    assert all(told in note and "balance.use=core/in-order" in note for note in notes)
