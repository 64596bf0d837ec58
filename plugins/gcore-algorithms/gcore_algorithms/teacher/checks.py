"""What ``g-core check`` knows of a job with frozen models, from settings and files alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_language.engine_arguments import without_engine
from gcore_language.vocabularies import difference, read_vocabulary


def problems_of(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields one sentence for each problem of a resolved configuration, its path first."""
    roles = plan["roles"]
    policy = _directory(roles.get("policy", {}))
    for name in ("reference", "teacher"):
        role = roles.get(name)
        if role is None or not _is_ours(role):
            continue
        yield from without_engine(name, role)
        yield from _of_settings(name, role)
        directory = _directory(role)
        if directory is not None:
            yield from _of_files(name, role, directory, policy)
    yield from _of_rewards(plan)


def _is_ours(node: Mapping[str, Any]) -> bool:
    return str(node.get("use", "")).partition("/")[0] == "teacher"


def _directory(role: Mapping[str, Any]) -> Path | None:
    """Returns the role's model directory, where it is one on this machine."""
    path = Path(str((role.get("model") or {}).get("path") or ""))
    return path if path.parts and path.is_dir() else None


def _of_settings(name: str, role: Mapping[str, Any]) -> Iterator[str]:
    """A teacher has a model, and a reference no likeliest tokens."""
    if name == "teacher" and not role.get("model"):
        yield (
            "roles.teacher.model: a teacher is another model than the policy; give its path, as in "
            "model: {path: org/model}."
        )
    if name == "reference" and role["config"].get("top_k"):
        yield (
            "roles.reference.config.top_k: a reference gives no likeliest tokens; leave it out, or "
            "name the role teacher."
        )


def _of_files(
    name: str, role: Mapping[str, Any], directory: Path, policy: Path | None
) -> Iterator[str]:
    """The top k are not more than the vocabulary, and token ids mean the same to the policy."""
    top_k = role["config"].get("top_k", 0)
    for whose, model in (("the model", directory), ("the policy", policy)):
        tokens = _embedded(model) if model else None
        if tokens is not None and top_k > tokens:
            yield (
                f"roles.{name}.config.top_k: {top_k} likeliest tokens are more than the {tokens} "
                f"that {whose} has."
            )
            break
    own, other = read_vocabulary(directory), read_vocabulary(policy) if policy else None
    if own is None or other is None:
        return
    if differs := difference(other, own):
        yield f"roles.{name}.model: {refusal(name, differs)}"


def refusal(role: str, differs: str) -> str:
    """Returns why a frozen model of another tokenizer is refused.

    differs: how the tokenizers differ.
    """
    return (
        f"its tokenizer is not the policy's, so that the same ids are other texts to it, and "
        f"neither log-probs of actions nor likeliest tokens can be compared ({differs}); take a "
        f"{role} of the policy's family."
    )


def _embedded(directory: Path) -> int | None:
    """Returns how many tokens a model directory's config says; None where it says nothing."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tokens = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return tokens if isinstance(tokens, int) else None


def _of_rewards(plan: Mapping[str, Any]) -> Iterator[str]:
    """An objective that weighs rewards has an advantage that comes from rewards."""
    objective = plan.get("objective") or {}
    if str((plan.get("advantage") or {}).get("use")) != "teacher/no-reward":
        return
    if not _is_ours(objective):
        yield (
            "objective.use: advantage teacher/no-reward is 0 everywhere, so only an objective that "
            "learns from a teacher learns anything; take teacher/reverse-kl or teacher/jsd."
        )
    elif objective["config"].get("reward_weight"):
        yield (
            "objective.config.reward_weight: advantage teacher/no-reward is 0 everywhere; take an "
            "advantage that comes from rewards, such as algorithms/grpo, or reward_weight: 0."
        )
