"""A job that names no sentinel gets gcore-sentinel's where that is installed, and is told so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gcore_core.config import catalog, checks, default_sentinel
from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command

Job = Callable[..., Path]
NAMED = "balance.use=core/in-order"  # so that nothing else is told


class WithoutSentinel(catalog.Catalog):
    """What is installed, less the plugin ``sentinel``."""

    def __init__(self) -> None:
        scanned = catalog.scan()
        rows = [row for row in scanned._rows if row.plugin.name != "sentinel"]
        super().__init__(rows, scanned._core_version, disabled=False)


def test_the_sequential_test_is_taken_where_it_is_installed_and_a_note_says_so(job: Job) -> None:
    plan = load_plan(job(), [NAMED])
    assert plan.provided["sentinel"].reference == "sentinel"
    assert plan.notes == ("sentinel.use is sentinel, as gcore-sentinel is installed",)


def test_a_policy_with_an_interpreter_of_its_own_gets_a_band_that_needs_no_plugin_there(
    job: Job,
) -> None:
    plan = load_plan(job(), [NAMED, f"roles.policy.python={sys.executable}"])
    assert plan.provided["sentinel"].reference == "sentinel/band"
    assert plan.notes[0].startswith("sentinel.use is sentinel/band, as roles.policy has")
    assert "sentinel" not in checks._built_beside("policy", plan.provided)
    assert plan.provided["sentinel"].is_of_the_core, "its ranks are asked for the plugin"
    assert not load_plan(job(), [NAMED]).provided["sentinel"].is_of_the_core


def test_without_the_plugin_the_core_compares_and_a_note_says_what_is_not_watched(
    job: Job,
) -> None:
    plan = load_plan(job(), [NAMED], installed=WithoutSentinel())
    assert plan.provided["sentinel"].reference == "core/band"
    (note,) = plan.notes
    assert note.startswith("sentinel.use is core/band, as plugin sentinel is not installed ")
    assert "gcore-sentinel also scores canaries" in note


def test_settings_without_a_name_are_those_of_the_sentinel_that_is_taken(job: Job) -> None:
    plan = load_plan(job(), ["sentinel.config.canaries=3"])
    assert plan.config["sentinel"]["config"]["canaries"] == 3


def test_a_sentinel_that_is_named_is_taken_without_a_note(job: Job) -> None:
    plan = load_plan(job(), [NAMED, "sentinel.use=core/band"])
    assert plan.provided["sentinel"].reference == "core/band"
    assert plan.notes == ()


def test_the_key_that_moved_says_where_it_is(job: Job) -> None:
    with pytest.raises(ConfigError) as raised:
        load_plan(job(), ["sentinel.canaries=3"])
    assert raised.value.where == "sentinel.canaries"
    assert "set sentinel.config.canaries" in raised.value.todo
    assert raised.value.todo.endswith(f": {install_command('gcore-sentinel')}")


def test_a_setting_that_the_core_lacks_says_who_has_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["sentinel.use=core/band", "sentinel.config.canaries=1"]
    with pytest.raises(ConfigError, match="core/band has no settings") as raised:
        load_plan(job(), settings)
    assert raised.value.todo == "set sentinel.use=sentinel/band, which has canaries"
    monkeypatch.setattr(default_sentinel, "find_installed", lambda name: None)
    with pytest.raises(ConfigError, match="core/band has no settings") as raised:
        load_plan(job(), settings[1:], installed=WithoutSentinel())
    command = install_command("gcore-sentinel")
    assert raised.value.todo == f"sentinel/band of gcore-sentinel has canaries: {command}"
    with pytest.raises(ConfigError, match="core/band has no settings") as raised:
        load_plan(job(), ["sentinel.use=core/band", "sentinel.config.x=1"])
    assert raised.value.todo == ""


def test_fewer_canaries_than_none_are_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="canaries: must be at least 0"):
        load_plan(job(), ["sentinel.config.canaries=-1"])
