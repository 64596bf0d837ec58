"""The list of hooks and their exact arguments is an interface: it changes here, in the specs and on
the page.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from gcore_core.contract import hookspecs
from gcore_core.contract.providers import KINDS, Provider

ROOT = Path(__file__).parents[2]

PROVIDER_HOOKS = {
    "gcore_controllers": [],
    "gcore_roles": [],
    "gcore_placement_policies": [],
    "gcore_generators": [],
    "gcore_trainers": [],
    "gcore_annotators": [],
    "gcore_rewards": [],
    "gcore_advantages": [],
    "gcore_objectives": [],
    "gcore_balancers": [],
    "gcore_environments": [],
    "gcore_sentinels": [],
    "gcore_observers": [],
    "gcore_filters": [],
    "gcore_datasets": [],
    "gcore_launchers": [],
    "gcore_commands": [],
    "gcore_venvs": [],
    "gcore_views": [],
}
OTHER_HOOKS = {
    "gcore_check": ["plan", "job"],
    "gcore_check_files": ["plan", "here", "datasets"],
    "gcore_answer_looks": ["looks", "say"],
    "gcore_preflight": ["job", "placed", "overrides", "facts"],
    "gcore_run_start": ["run"],
    "gcore_step_end": ["run", "report"],
    "gcore_weights_published": ["run", "version"],
    "gcore_checkpoint_saved": ["run", "step", "path"],
    "gcore_worker_failed": ["run", "failure"],
    "gcore_run_end": ["run", "error"],
}
HOOKS = PROVIDER_HOOKS | OTHER_HOOKS


def specs() -> dict[str, list[str]]:
    found = inspect.getmembers(
        hookspecs, lambda value: inspect.isfunction(value) and hasattr(value, "gcore_spec")
    )
    return {name: list(inspect.signature(spec).parameters) for name, spec in found}


def test_the_hooks_have_exactly_these_arguments() -> None:
    assert specs() == HOOKS


def test_the_page_shows_every_hook_with_its_exact_arguments_and_no_other() -> None:
    page = (ROOT / "docs/reference/hooks.md").read_text()
    shown = re.findall(r"^(?:\| |### )`(gcore_\w+)\(([^)]*)\)`", page, flags=re.M)
    assert sorted(shown) == sorted(
        (name, ", ".join(arguments)) for name, arguments in HOOKS.items()
    )


def test_every_hook_says_what_it_is_for() -> None:
    for name in HOOKS:
        assert (getattr(hookspecs, name).__doc__ or "").strip(), name


def test_every_kind_of_provider_has_its_own_hook() -> None:
    assert {hook for hook, _ in KINDS.values()} == set(PROVIDER_HOOKS)


def test_the_page_names_the_description_that_each_hook_yields() -> None:
    page = (ROOT / "docs/reference/hooks.md").read_text()
    for hook, cls in KINDS.values():
        assert f"| `{hook}()` | `{cls.__name__}` |" in page


def page_words() -> set[str]:
    """Every word that the page of hooks has in a row's or a sentence's code."""
    page = (ROOT / "docs/reference/hooks.md").read_text()
    page = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))


def test_the_page_names_every_field_of_a_description() -> None:
    classes = [Provider, *(cls for _, cls in KINDS.values())]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert {"memory", "level", "twin"} <= fields
    assert sorted(fields - page_words()) == []
