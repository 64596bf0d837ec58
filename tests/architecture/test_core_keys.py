"""A new key of the core is declared once, with its default, its limits and its explanation.

All of it stands in gcore_core/contract/job_settings.py; the tables of docs/reference/config.md are
made from there.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gcore_core.config.schema import core_keys, limits
from gcore_core.contract import job_settings
from tests.support import made_pages

ROOT = Path(__file__).parents[2]
KEYS = set(core_keys())


def test_the_page_explains_every_key_and_no_other() -> None:
    shown = re.findall(r"^\| `([^`]+)` \|", made_pages.page("reference/config.md"), flags=re.M)
    assert sorted(key.replace("<name>", "*") for key in shown) == sorted(KEYS)


def test_every_key_has_a_text_under_its_declaration() -> None:
    help_of = made_pages.extension().help_of
    assert [key for key in KEYS if not help_of(key)] == []


def test_a_note_on_a_key_that_there_is_not_is_an_error() -> None:
    page = "```{made} keys run\nThe table.\n- `run.ever` see [more](#more)\n```\n"
    with pytest.raises(ValueError, match="no row of the name run.ever"):
        made_pages.extension().expand(page)


#: A key that the core hands on -> the module of a distribution that reads it.
READ_BY_PLUGINS = {"cluster.device_gib": "plugins/gcore-tools/gcore_tools/plan/memory_needs.py"}


def attributes_read(path: Path) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_key_is_read_somewhere() -> None:
    """``settings.run.seed`` reads ``seed``; a key that nobody reads would be a promise not kept."""
    read = set[str]().union(*map(attributes_read, (ROOT / "gcore_core").rglob("*.py")))
    # Where a provider is chosen, plan.py takes "use" and "config" out of the plain tree.
    unread = {key for key in KEYS if key.rpartition(".")[2] not in read | {"use", "config"}}
    assert unread == set(READ_BY_PLUGINS)
    for key, module in READ_BY_PLUGINS.items():
        assert key.rpartition(".")[2] in attributes_read(ROOT / module)


def test_every_default_is_within_its_own_limits() -> None:
    settings = job_settings.JobSettings(
        roles={"policy": job_settings.RoleSettings()},
        rewards={"exact": job_settings.RewardSettings()},
    )
    limited = list(limits(settings))
    assert {"run.steps", "roles.policy.slots", "rewards.exact.normalise"} < {
        path for path, _, _ in limited
    }
    assert [(path, limit.problem(value)) for path, value, limit in limited] == [
        (path, "") for path, _, _ in limited
    ]


def test_settings_are_read_as_attributes() -> None:
    """``plan.config["run"]`` is not checked by mypy; ``plan.settings.run`` is."""
    read_by_string = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "gcore_core").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in ("config", "settings")
    ]
    assert read_by_string == []
