"""Kinds F and G: tokens and masks, and what is joined to the wrong row or group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from gcore_testing.museum import Exhibit, Expected, Scene

from tests.museum.exhibits.forward import _prompts
from tests.museum.exhibits.weights import AGAIN, GENERATOR

SEALS = "seal of a record"
TERMS = "terms of a loss"
#: The score of one record that is asked for alone.
ALONE = "a record asked alone"
RECEIPTS = "receipt of rewards"
PROMPTS = "prompts of a group"
_BOS = 1


def _reading(
    scene: Scene, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
) -> None:
    """Changes the columns of records as they are read from the store."""

    def make(records_of: Callable[..., Any]) -> Callable[..., Any]:
        async def planted(self: Any, items: Any) -> Any:
            contents = await records_of(self, items)
            changed = []
            for columns, media in contents:
                other = change(dict(columns))
                if any(not np.array_equal(other[name], columns[name]) for name in columns):
                    scene.act()
                changed.append((other, media))
            return changed

        return planted

    scene.wrap("gcore_core.store.client:StoreReader.records", make)


def _encoded_again(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Decodes and encodes an answer, which loses its special tokens; a mask of the new length."""
    ids = columns["action_ids"]
    plain = ids[ids > 2]
    if len(plain) in (0, len(ids)):
        return columns
    kept = ids > 2
    return columns | {
        "action_ids": plain,
        "action_mask": columns["action_mask"][kept],
        "logp": columns["logp"][kept],
    }


def _slots_swapped(scene: Scene) -> None:
    """Every record of a chunk is read from the chunk's first place."""

    def make(item_of: Callable[..., Any]) -> Callable[..., Any]:
        def planted(header: Any, plan: Any) -> Any:
            import msgspec

            item = item_of(header, plan)
            if item.slot:
                scene.act()
            return msgspec.structs.replace(item, slot=0)

        return planted

    scene.wrap("gcore_core.controllers.training:train_item", make)


def _batching(scene: Scene, change: Callable[[Any], Any]) -> None:
    """Changes the micro-batches of the trainer when they are packed."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def planted(*arguments: Any, **layout: Any) -> Any:
            batch = original(*arguments, **layout)
            changed = change(batch)
            if changed is not batch:
                scene.act()
            return changed

        return planted

    scene.wrap("gcore_language.packing:_batch", make)


def _columns(batch: Any, **changed: Any) -> Any:
    return dataclasses.replace(batch, columns=batch.columns | changed)


def _last_masked(batch: Any) -> Any:
    """Masks the last token of every answer, as a mask by the pad's id does where it ends texts."""
    import torch

    record = batch.columns["record"]
    last = torch.ones_like(record, dtype=torch.bool)
    last[:-1] = record[1:] != record[:-1]
    return _columns(batch, mask=batch.columns["mask"] & ~last)


def _all_trained(batch: Any) -> Any:
    import torch

    mask = batch.columns["mask"]
    return batch if mask.all() else _columns(batch, mask=torch.ones_like(mask))


def _tool_tokens(scene: Scene) -> None:
    """Some tokens of each answer are not the policy's own; the trainer learns them all the same."""

    def make(columns_of: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, indexes: Any) -> Any:
            records = columns_of(self, indexes)
            for columns in records:
                mask = columns["action_mask"].copy()
                mask[1:3] = 0
                columns["action_mask"] = mask
            return records

        return planted

    scene.wrap(f"{GENERATOR}._columns", make)
    _batching(scene, _all_trained)


def _rows_reversed(batch: Any) -> Any:
    return dataclasses.replace(batch, index=batch.index[::-1].copy())


def _advantage_as_mask(scene: Scene) -> None:
    def make(loss: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, pass_: Any, batch: Any, *rest: Any) -> Any:
            mask = batch.columns["advantage"] > 0
            if bool((mask != batch.columns["mask"]).any()):
                scene.act()
                batch.columns["mask"] = mask
            return loss(self, pass_, batch, *rest)

        return planted

    scene.wrap("gcore_language.training:LanguageTrainer._loss", make)


def _taken(scene: Scene, change: Callable[[list[list[Any]]], None]) -> None:
    """Changes the groups that a step takes."""

    def make(groups_taken: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, *arguments: Any) -> Any:
            groups = groups_taken(self, *arguments)
            before = [dict(header.rewards) for group in groups for header in group]
            change(groups)
            if before != [dict(header.rewards) for group in groups for header in group]:
                scene.act()
            return groups

        return planted

    scene.wrap("gcore_core.controllers.generation.producer:Producer._groups_taken", make)


def _rewards_of_the_row_beside(groups: list[list[Any]]) -> None:
    headers = [header for group in groups for header in group]
    rewards = [header.rewards for header in headers]
    for header, other in zip(headers, rewards[1:] + rewards[:1], strict=True):
        header.rewards = other


def _sorted_by_length(groups: list[list[Any]]) -> None:
    """Rewards go by the records' length, which keeps them in their group."""
    for group in groups:
        rewards = [header.rewards for header in sorted(group, key=lambda h: h.n_actions)]
        for header, other in zip(group, rewards, strict=True):
            header.rewards = other


def _answers_of_others(scene: Scene) -> None:
    """The first and the last of the samples that end together trade their answers."""

    def make(collect: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any) -> Any:
            finished = collect(self)
            if len(finished) > 1:
                first, last = finished[0], finished[-1]
                if first.request.ordinal != last.request.ordinal:
                    scene.act()
                    finished[0] = dataclasses.replace(first, request=last.request)
                    finished[-1] = dataclasses.replace(last, request=first.request)
            return finished

        return planted

    scene.wrap(f"{GENERATOR}._collect", make)


def _balanced(scene: Scene) -> None:
    """Records are trained in another order; groups still go by their ordinals."""

    def make(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, minibatches: Any) -> Any:
            scene.act()
            return prepare(self, [list(reversed(part)) for part in minibatches])

        return planted

    scene.wrap("gcore_language.training:LanguageTrainer.pack", make)


def _scores_rotated(scene: Scene) -> None:
    """A reward that scores several records gives each the score of the one beside."""

    def make(score: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, records: Any) -> Any:
            scores = score(self, records)
            if len(scores) > 1:
                scene.act()
            return scores[1:] + scores[:1]

        return planted

    scene.wrap("gcore_core.builtin.function_reward:FunctionScorer.score", make)


def _drawn_at_random(scene: Scene) -> None:
    """A reward that is drawn anew each time: unwise, but no fault of ours."""

    def make(score: Callable[..., Any]) -> Callable[..., Any]:
        random = np.random.default_rng(0)

        def planted(self: Any, records: Any) -> Any:
            scene.act()
            return [
                dataclasses.replace(one, value=float(random.random()))
                for one in score(self, records)
            ]

        return planted

    scene.wrap("gcore_core.builtin.function_reward:FunctionScorer.score", make)


EXHIBITS = (
    Exhibit(
        id="scores-in-another-order",
        thread="verl#2185",
        kind="G",
        fault="A reward sorts its records by length and returns scores in that order.",
        shown="no error; found by reading",
        plant=_scores_rotated,
        overrides=("rewards.digits.alone_every=4",),
        expected=Expected(
            detector=ALONE, error="RecordMismatch", names=("rewards.digits", "record", "alone")
        ),
    ),
    Exhibit(
        id="reward-drawn-at-random",
        thread="verl#2185",
        kind="G",
        fault="A reward is random, so a record asked for twice has two scores.",
        shown="no fault",
        plant=_drawn_at_random,
        overrides=("rewards.digits.alone_every=4",),
        expected=Expected(detector="nothing"),
        control=True,
    ),
    Exhibit(
        id="two-begin-tokens",
        thread="trl#3853",
        kind="F",
        fault="The template's text is encoded again: the engine reads two begin tokens, the trainer"
        " one.",
        shown="lower reward than without the engine; a user printed ids",
        plant=lambda scene: _prompts(
            scene, lambda p, n: np.concatenate([np.array([_BOS], p.dtype), p])
        ),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "rollout.0", "first token of prompts twice"),
        ),
    ),
    Exhibit(
        id="encoded-again",
        thread="trl#5224",
        kind="F",
        fault="Answers are decoded and encoded again on their way to the trainer.",
        shown="spikes of the KL",
        plant=lambda scene: _reading(scene, _encoded_again),
        expected=Expected(
            detector=SEALS,
            error="RecordMismatch",
            names=("record", "sealed", "changed after they were sampled"),
        ),
    ),
    Exhibit(
        id="end-token-masked",
        thread="pytorch/rl#3578",
        kind="F",
        fault="Tokens are masked by the pad's id, which is the end token's: it is never learned.",
        shown="a mismatch at the last token",
        plant=lambda scene: _batching(scene, _last_masked),
        expected=Expected(
            detector=TERMS, error="RecordMismatch", names=("step 0", "record 0/0", "action_mask")
        ),
    ),
    Exhibit(
        id="tool-tokens-trained",
        thread="trl#4975",
        kind="F",
        fault="One path of the loss ignores the mask of tokens that the policy did not sample.",
        shown="nothing; the run went to its end",
        plant=_tool_tokens,
        expected=Expected(
            detector=TERMS, error="RecordMismatch", names=("step 0", "record 0/0", "action_mask")
        ),
    ),
    Exhibit(
        id="advantage-as-mask",
        thread="verl#2506",
        kind="G",
        fault="Advantages are passed where the mask belongs.",
        shown="nothing; found by reading",
        plant=_advantage_as_mask,
        expected=Expected(
            detector=TERMS, error="RecordMismatch", names=("step 0", "record", "action_mask")
        ),
    ),
    Exhibit(
        id="rewards-of-the-row-beside",
        thread="NeMo-RL#3794",
        kind="G",
        fault="After groups were filtered, rewards are joined to the rows beside.",
        shown="marker rewards in a test",
        plant=lambda scene: _taken(scene, _rewards_of_the_row_beside),
        expected=Expected(
            detector=RECEIPTS,
            error="RecordMismatch",
            names=("record", "no scorer gave", "belong to another record"),
        ),
    ),
    Exhibit(
        id="rewards-in-the-old-order",
        thread="verl#2185",
        kind="G",
        fault="Records are sorted by length, their rewards stay in the old order.",
        shown="no error; found by reading",
        plant=lambda scene: _taken(scene, _sorted_by_length),
        expected=Expected(
            detector=RECEIPTS,
            error="RecordMismatch",
            names=("record", "no scorer gave", "belong to another record"),
        ),
    ),
    Exhibit(
        id="packed-order",
        thread="SkyRL#2209",
        kind="G",
        fault="What belongs to records is read in the order in which they were packed.",
        shown="nothing",
        plant=lambda scene: _batching(scene, _rows_reversed),
        expected=Expected(
            detector=TERMS, error="RecordMismatch", names=("step 0", "record", "another tokens")
        ),
    ),
    Exhibit(
        id="columns-of-another",
        thread="SkyRL#2209",
        kind="G",
        fault="Records are read from the place of another one of their chunk.",
        shown="nothing",
        plant=_slots_swapped,
        expected=Expected(
            detector=SEALS, error="RecordMismatch", names=("step 0", "record", "sealed")
        ),
    ),
    Exhibit(
        id="answers-of-others",
        thread="trl#6673",
        kind="G",
        fault="Prompts are paired with the answers to other prompts.",
        shown="no crash",
        plant=_answers_of_others,
        expected=Expected(
            detector=PROMPTS, error="RecordMismatch", names=("step 0", "record", "another prompt")
        ),
    ),
    Exhibit(
        id="order-of-training",
        thread="verl#1718",
        kind="G",
        fault="Records are reordered to balance work; groups go by their id, so nothing is wrong.",
        shown="asked whether it is a fault; it is not",
        plant=_balanced,
        expected=Expected(detector="nothing"),
        control=True,
    ),
)
