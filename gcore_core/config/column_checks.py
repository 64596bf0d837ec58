"""Checks that what an objective or an advantage requires is given by somebody.

``problems_of`` is the check; ``given_columns`` says what a role gives in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from gcore_core.contract.algorithms import ids_column
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.preflight import ChosenProvider, ResolvedJob
from gcore_core.contract.providers import RoleProvider
from gcore_core.contract.traits import traits_of

#: What every trainer supplies to an objective, and to an advantage of level "record".
FROM_TRAINER = frozenset(
    {"age", "old_logp", "ref_logp", "entropy", "rollout_logp", "group", "sample"}
    | {"kl_k1", "kl_k2", "kl_k3"}
)
#: What a model with a value head supplies in its place to the objective that trains it.
FROM_VALUE_MODEL = frozenset({"values", "old_values", "group", "sample"})


def problems_of(job: ResolvedJob, roles: Mapping[str, RoleProvider]) -> Iterator[str]:
    """Yields one sentence for each problem with columns, its config path first.

    roles: name -> description of every role that a loaded plugin offers.
    """
    yield from _givers(job)
    yield from _widths(job, roles)
    for path, item in job.provided.items():
        # A trainer that lacks an output is the reason for columns that are missing with it.
        lacking = list(_outputs(job, path)) if item.kind == "objective" else []
        yield from lacking
        if item.kind in ("advantage", "objective") and not lacking:
            yield from _requirements(job, path, roles)
    yield from _advantages_of_actions(job)


def given_columns(role: RoleProvider, config: Any) -> tuple[ColumnSpec, ...]:
    """Returns the columns that a role gives in this run, in the order of its description.

    config: the settings object of the role's backend, which says how wide columns [A, k] are.
    """
    widths = traits_of(config).column_widths
    return tuple(
        replace(column, k=widths[column.name]) if column.wide else column
        for column in role.column_specs
        if not column.wide or widths.get(column.name)
    )


def is_of_actions(provided: Mapping[str, ChosenProvider]) -> bool:
    """Returns whether the job's advantage is computed for each action, on ranks."""
    advantage = provided.get("advantage")
    return advantage is not None and getattr(advantage.spec, "level", "") == "action"


def _givers(job: ResolvedJob) -> Iterator[str]:
    """A column comes from one role only."""
    giver: dict[str, str] = {}
    for name in job.settings.roles:
        for column in job.columns.get(name, ()):
            if column.name in giver:
                yield (
                    f"roles.{name}: gives {column.name!r}, as roles.{giver[column.name]} does; "
                    "leave one of them out."
                )
            giver.setdefault(column.name, name)


def _widths(job: ResolvedJob, roles: Mapping[str, RoleProvider]) -> Iterator[str]:
    """A backend says widths of wide columns that some role gives, and none is negative.

    The column may be another role's, since a backend may serve several roles. A width of 0 says
    that the column is not given.
    """
    wide = {column.name for role in roles.values() for column in role.column_specs if column.wide}
    for name in job.settings.roles:
        for column, k in traits_of(job.objects.get(f"roles.{name}")).column_widths.items():
            if column not in wide or k < 0:
                yield (
                    f"roles.{name}.config: says that column {column!r} has {k} numbers for each "
                    "action, and no installed role gives such a column; ask its author."
                )


def _advantages_of_actions(job: ResolvedJob) -> Iterator[str]:
    """All trainers compute an advantage that is one number for each action."""
    if not is_of_actions(job.provided):
        return
    for name in job.settings.roles:
        trainer = job.provided[f"roles.{name}"]
        has_it = traits_of(job.objects.get(f"roles.{name}")).action_advantages
        if trainer.kind == "trainer" and not has_it:
            yield (
                f"roles.{name}.use: {trainer.reference} cannot compute advantages for each action, "
                f"as {job.provided['advantage'].reference} does; take a trainer with the trait "
                "action_advantages, such as torch."
            )


def _requirements(job: ResolvedJob, path: str, roles: Mapping[str, RoleProvider]) -> Iterator[str]:
    """The columns and scalars that an objective or an advantage requires come from somewhere.

    path: where it is chosen.
    """
    givers = _possible_givers(job, path, roles)
    given = {column.name for role in givers for column in job.columns.get(role.name, ())}
    supplied = given | _from_trainer(job, path) | _from_generator(job, path)
    required = {ids_column(name) or name for name in traits_of(job.objects.get(path)).requires}
    giver_of = {column.name: role.name for role in givers for column in role.column_specs}
    for name in sorted(required - supplied):
        role = giver_of.get(name)
        if role is None:
            yield _not_supplied(job, path, name, supplied)
        elif role in job.columns:
            yield (
                f"{path}: requires {name!r}, which roles.{role} gives only where "
                f"roles.{role}.config says of how many numbers; set that."
            )
        else:
            yield f"{path}: requires {name!r}, which roles.{role} gives; add that role."


def _outputs(job: ResolvedJob, path: str) -> Iterator[str]:
    """The trainer of an objective computes what its loss reads of the weights that are trained.

    path: where the objective is chosen.
    """
    role = f"roles.{POLICY}" if path == "objective" else path.removesuffix(".objective")
    trainer, traits = job.provided.get(role), traits_of(job.objects.get(role))
    required = traits_of(job.objects.get(path)).requires
    if trainer is None:
        return
    if "values" in required and not traits.value_head:
        yield (
            f"{role}.use: {trainer.reference} has no value head, which {path} "
            f"({job.provided[path].reference}) trains; take a trainer with the trait value_head, "
            "such as torch."
        )
    of_tokens = sorted(filter(ids_column, required))
    if of_tokens and not traits.token_logprobs:
        yield (
            f"{path}: requires {of_tokens[0]!r}, log-probs of other tokens than the actions, and "
            f"{trainer.reference}, which {role} uses, does not compute them; take a trainer with "
            "the trait token_logprobs, such as torch, or an objective that needs none."
        )


def _possible_givers(
    job: ResolvedJob, path: str, roles: Mapping[str, RoleProvider]
) -> list[RoleProvider]:
    """Returns the installed roles that can give columns to what is chosen at a path.

    This run's come last: where several could give one name, the last one is meant.
    """
    # Roles give per-action columns; an advantage of level "record" gets numbers of records.
    if path == "advantage" and not is_of_actions(job.provided):
        return []
    givers = [role for role in roles.values() if role.columns]
    return sorted(givers, key=lambda role: role.name in job.columns)


def _from_trainer(job: ResolvedJob, path: str) -> frozenset[str]:
    """Returns what the trainer itself supplies to what is chosen at a path."""
    of_actions = is_of_actions(job.provided)
    if path == "advantage" and of_actions:
        return traits_of(job.objects.get(f"roles.{POLICY}")).own_columns
    if path != "advantage" and "values" in traits_of(job.objects.get(path)).requires:
        return FROM_VALUE_MODEL | ({"returns"} if of_actions else set())
    return FROM_TRAINER


def rollout_columns(provided: Mapping[str, ChosenProvider]) -> list[str]:
    """Returns the columns of the rollout's records that not every generator writes.

    The environment's come last.
    """
    makers = [provided.get(path) for path in (f"roles.{ROLLOUT}", "environment")]
    return [name for maker in makers if maker for name in getattr(maker.spec, "columns", ())]


def _from_generator(job: ResolvedJob, path: str) -> Set[str]:
    """Returns which columns of the rollout's records what is chosen at a path is given."""
    if path == "advantage" and not is_of_actions(job.provided):
        return frozenset()
    return frozenset(rollout_columns(job.provided))


def _not_supplied(job: ResolvedJob, path: str, name: str, supplied: Set[str]) -> str:
    """Says that nothing installed gives a name, and which names are known."""
    known = ", ".join(sorted(supplied)) or "none"
    no_role = ": no installed role gives it"
    if path == "advantage":
        gets_columns = is_of_actions(job.provided)
        no_role = ": no loaded plugin has a role that gives it" if gets_columns else ""
    return f"{path}: requires {name!r}, which nothing supplies{no_role} (known: {known})."
