"""What a trainer's engine needs to let its ranks share micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_language.context.groups import ContextGroups, make_groups
from gcore_language.context.layout import cut_where_needed, shared_by_all
from gcore_language.context.packing import shared_batches
from gcore_language.context.policy import SharedPolicy, Split, check_shared, shared_policy
from gcore_language.context.settings import ContextSettings, divided_heads
from gcore_language.packing import Batch, Sample
from gcore_language.policy import Policy
from gcore_language.ranks import Ranks


class Sharing:
    """One rank's part in sharing, by ``context`` of a trainer's settings.

    The first rank of each context group speaks in ``Ranks``, since all have the same records.
    """

    def __init__(
        self, settings: ContextSettings, groups: ContextGroups, role: str, device: torch.device
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._role = role
        self._device = device

    def share(self, policy: Policy, kind: type[SharedPolicy] | None = None) -> SharedPolicy:
        """Returns a policy of the same model with shared rows; to be called before it is sharded.

        kind: see ``shared_policy``.

        Raises ConfigError for a model of which ranks cannot share rows.
        """
        where = f"roles.{self._role}.config.context"
        if policy.routers is not None:
            raise ConfigError("slots cannot share records of a mixture of experts.", where=where)
        if policy.takes_images:
            raise ConfigError("slots cannot share records that may have images.", where=where)
        text = policy.model.config.get_text_config()
        heads = int(text.num_attention_heads)
        key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        problem = divided_heads(heads, key_heads, self._settings.ulysses)
        if problem:
            raise ConfigError(
                f"{problem}.", where=f"{where}.ulysses", todo="take more ring and less ulysses"
            )
        return shared_policy(policy, self._groups, self._split(int(text.hidden_size)), kind)

    def check(self, policy: Policy, *, tolerance: float) -> None:
        """Tries shared rows of a policy that ``share`` has returned; see ``check_shared``."""
        check_shared(policy, self._device, tolerance=tolerance)

    def _split(self, hidden_size: int) -> Split:
        ring, ulysses = self._settings.ring, self._settings.ulysses
        if self._settings.whole == "never":
            return lambda lengths: shared_by_all(lengths, ring, ulysses)
        return lambda lengths: cut_where_needed(lengths, ring, ulysses, hidden_size)

    def packed(
        self,
        samples: Sequence[Sample],
        budget_tokens: int,
        hidden_size: int,
        *,
        whole_groups: bool,
    ) -> list[Batch]:
        """Returns the micro-batches of one minibatch; see ``shared_batches``."""
        return shared_batches(
            samples,
            budget_tokens,
            self._settings.degree,
            hidden_size,
            self._device,
            whole_groups=whole_groups,
        )


def make_sharing(
    settings: ContextSettings, context: WorkerContext, ranks: Ranks, device: torch.device
) -> Sharing | None:
    """Returns None where ranks do not share records.

    Raises ConfigError for a run in which they cannot.
    """
    if settings.degree == 1:
        return None
    where = f"roles.{context.role}.config.context"
    if ranks.count % settings.degree:
        raise ConfigError(
            f"{ranks.count} slots cannot be divided into groups of {settings.degree}.",
            where=f"roles.{context.role}.slots",
            why="A context group takes ulysses x ring slots.",
        )
    if context.deterministic:
        raise ConfigError(
            "slots that share a record do not go with a deterministic run.",
            where=where,
            why="Sums over them have other bits for another number of slots.",
        )
    groups = make_groups(settings.ring, settings.ulysses, ranks.rank, ranks.count)
    ranks.speaks = groups.is_first
    return Sharing(settings, groups, context.role, device)
