"""Makes batches of rows from records.

A row is one transition of a record, or, for a forward-process objective, one noise level that is
drawn for a record's clean latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.errors import ContractError, DataError
from gcore_core.contract.trainer import TrainRecord
from gcore_diffusion.conditions import from_array, stacked
from gcore_diffusion.kernel import Levels
from gcore_diffusion.way import Condition


@dataclass(kw_only=True)
class Rows:
    """The R rows of some records, record after record.

    ``gcore_language.training`` calls this a batch.

    index: int64[records], places of the records among the prepared ones.
    columns: what the objective gets, [R] each.
    x: float32[R, *D], the latent that the model is given.
    following: float32[R, *D], the latent that was drawn after ``x``; for a forward-process
        objective what the model is to predict.
    times: float32[R], the model's time input; for a forward-process objective the noise level.
    place: int64[R], which of the conditions a row has.
    condition: the conditions of the prompts by name, [conditions, ...] each.
    levels: noise levels of each transition; None for a forward-process objective.
    old: float32[R, *D], the old policy's outputs for a forward-process objective; None until they
        are known.
    reference: float32[R, *D], the reference's means or outputs; None until they are known.
    """

    index: np.ndarray
    columns: dict[str, Tensor]
    x: Tensor
    following: Tensor
    times: Tensor
    place: Tensor
    condition: Condition
    levels: Levels | None
    old: Tensor | None = None
    reference: Tensor | None = field(default=None)

    def __len__(self) -> int:
        return len(self.times)

    def conditions_of(self, part: slice) -> Condition:
        """Returns the conditions of some rows, [rows, ...] each."""
        return {name: tensor[self.place[part]] for name, tensor in self.condition.items()}


def transitions(
    placed_records: Sequence[tuple[int, TrainRecord]], device: torch.device, guidance: float
) -> Rows:
    """Returns the recorded transitions of the records as rows.

    placed_records: (place among the prepared records, record) of each.

    Raises ContractError for a record without its condition, with latents that are not float32 or
    with another guidance.
    """
    index, columns, place, condition = _begin(
        placed_records, [len(r.columns["logp"]) for _, r in placed_records], device
    )
    parts: dict[str, list[np.ndarray]] = {
        name: [] for name in ("x", "following", "here", "after", "second", "times", "logp", "mask")
    }
    for _, record in placed_records:
        record_columns = record.columns
        check_guidance(record_columns, guidance)
        latents = _latents(record_columns)
        levels = record_columns["levels"]
        steps = record_columns["steps"].astype(np.int64)
        parts["x"].append(latents[:-1])
        parts["following"].append(latents[1:])
        parts["here"].append(levels[steps])
        parts["after"].append(levels[steps + 1])
        parts["second"].append(np.repeat(levels[1], len(steps)))
        parts["times"].append(record_columns["times"][steps])
        parts["logp"].append(record_columns["logp"])
        parts["mask"].append(record_columns["action_mask"].astype(np.bool_))
    joined = {
        name: torch.from_numpy(np.concatenate(arrays)).to(device) for name, arrays in parts.items()
    }
    columns |= {"mask": joined["mask"], "rollout_logp": joined["logp"]}
    return Rows(
        index=index,
        columns=columns,
        x=joined["x"],
        following=joined["following"],
        times=joined["times"],
        place=place,
        condition=condition,
        levels=Levels(here=joined["here"], after=joined["after"], second=joined["second"]),
    )


def forward_process(
    placed_records: Sequence[tuple[int, TrainRecord]],
    device: torch.device,
    draws: int,
    stream: Callable[[TrainRecord], np.random.Generator],
) -> Rows:
    """Draws ``draws`` noise levels for each record's clean latent, one row each.

    At noise level t, x = (1 - t) clean + t noise; the flow to predict is noise - clean.

    placed_records: (place among the prepared records, record) of each.
    stream: returns the random stream of a record.

    Raises ContractError for a record without its condition, DataError for one without its clean
    latent.
    """
    index, columns, place, condition = _begin(placed_records, [draws] * len(placed_records), device)
    clean = torch.from_numpy(np.stack([_clean(record.columns) for _, record in placed_records])).to(
        device
    )
    clean = clean.repeat_interleave(draws, 0)
    streams = [stream(record) for _, record in placed_records]
    shape = (draws, *clean.shape[1:])
    sigmas = [random.random(draws, np.float32) for random in streams]
    noises = [random.standard_normal(shape, np.float32) for random in streams]
    sigma = torch.from_numpy(np.concatenate(sigmas)).to(device)
    noise = torch.from_numpy(np.concatenate(noises)).to(device)
    wide = sigma.view(-1, *[1] * (clean.dim() - 1))
    zeros = torch.zeros(len(clean), device=device)
    columns |= {
        "mask": torch.ones(len(clean), dtype=torch.bool, device=device),
        "rollout_logp": zeros,
    }
    return Rows(
        index=index,
        columns=columns,
        x=(1 - wide) * clean + wide * noise,
        following=noise - clean,
        times=sigma,
        place=place,
        condition=condition,
        levels=None,
    )


def _begin(
    placed_records: Sequence[tuple[int, TrainRecord]], counts: Sequence[int], device: torch.device
) -> tuple[np.ndarray, dict[str, Tensor], Tensor, Condition]:
    """Returns what both kinds of rows have: (index, columns, place, condition) of ``Rows``.

    The only column is ``record`` int64[R]: which of ``placed_records`` a row belongs to. A
    condition is read once for all records whose arrays lie at the same address.

    counts: how many rows each record has.
    """
    place_of: dict[tuple[int, int], int] = {}
    conditions: list[Mapping[str, np.ndarray]] = []
    places = []
    for _, record in placed_records:
        if "condition" not in record.media:
            raise ContractError(
                "a record comes without its condition", where=f"ordinal {record.ordinal}"
            )
        array = record.media["condition"]
        key = array.__array_interface__["data"][0], array.nbytes
        if key not in place_of:
            place_of[key] = len(conditions)
            conditions.append(from_array(array))
        places.append(place_of[key])
    repeats = torch.tensor(counts)
    record_of = torch.arange(len(placed_records)).repeat_interleave(repeats).to(device)
    place = torch.tensor(places).repeat_interleave(repeats).to(device)
    return (
        np.array([i for i, _ in placed_records], np.int64),
        {"record": record_of},
        place,
        stacked(conditions, device),
    )


def _latents(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    latents = columns["latents"]
    if latents.dtype != np.float32:
        raise ContractError(
            f"latents are {latents.dtype}, not float32",
            where="column latents",
            why="rounding them moves every log-prob by more than a clip range",
        )
    return latents


def _clean(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    if "clean" not in columns:
        raise DataError(
            "a record has no clean latent, which a forward-process objective needs.",
            where="column clean",
        )
    return columns["clean"]


def check_guidance(columns: Mapping[str, np.ndarray], guidance: float) -> None:
    """Raises ContractError unless the record was sampled with the trainer's guidance."""
    sampled = float(columns["guidance"])
    if sampled != np.float32(guidance):
        raise ContractError(
            f"records were sampled with guidance {sampled:g}, the trainer has {guidance:g}",
            where="roles.<trainer>.config.guidance",
            why="the ratio of the two policies would not be 1 before the first update",
            todo="set guidance to the same number in both roles",
        )


def chunks(
    items: Sequence[tuple[int, TrainRecord]], size: int
) -> Iterator[Sequence[tuple[int, TrainRecord]]]:
    """Cuts the items into runs of at most ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
