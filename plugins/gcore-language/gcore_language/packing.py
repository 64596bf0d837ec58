"""Packs records into micro-batches.

A micro-batch says which tokens go through the model together, and which hidden state gives each
action's log-prob. The hidden state at one token predicts the next: a record's first action comes
from the last token of its prompt. Its last action predicts nothing, so it is never fed. Three
layouts give the same log-probs:

    flat    all tokens of the batch in one row without padding, each prompt once
            (``gcore_language.flat``)
    shared  a row per group: the prompt once, then its completions, kept apart by positions and a
            4-D mask
    padded  a row per record, padded on the right, where causal attention never looks

An example: prompt p q with completions a b c and d e. Fed are a b and d.

    flat    p q | a b | d       shared  p q a b d       padded  p q a b
                                                                p q d .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.columns import ROUTING, Columns
from gcore_language.alignment import aligned
from gcore_language.flat import Block, FlatLayout
from gcore_language.images import Images
from gcore_language.routing import lay_routing

Layout = Literal["flat", "shared", "padded"]

#: Longest row (prompt and one completion) for which keeping attention probabilities pays.
FLAT_ROW_TOKENS = 256
#: To a multiple of this many tokens ``steady`` batches pad the rows of their attention.
_STEADY_TOKENS = 16
#: Most keys of such a row. A library sums the products of more keys in blocks, and where a block
#: ends depends on how far the row is padded: seen from 193 keys on, with MKL and AVX-512.
STEADY_KEYS = 192
#: Most attention probabilities of one head in a flat micro-batch.
_FLAT_SCORES = 2**21
#: Longest row of the shared layout: its mask is the square of it.
_SHARED_ROW_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One record that has at least one action.

    index: place of the record among the prepared ones.
    ordinal: number of its group.
    prompt: int32[P], tokens of the prompt.
    columns: the record's; ``action_ids`` is int32[A] with A > 0.
    images: images of the prompt; None without any.
    number: of the record in its group.
    """

    index: int
    ordinal: int
    prompt: np.ndarray
    columns: Columns
    images: Images | None = None
    number: int = 0

    @property
    def fed(self) -> int:
        """How many tokens of the completion go through the model: all but the last."""
        return len(self.columns["action_ids"]) - 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one forward pass needs, and the columns of its A actions, record after record.

    ids: int64[N] if flat, else int64[rows, W].
    predict: int64[A], the index of the hidden state that predicts each action: into the flattened
        rows, or, if flat, into the predicting tokens.
    targets: int64[A], the actions' token ids.
    temperature: float32[A]; None when all are 1.
    index: int64[R], ``Sample.index`` of the records in order.
    columns: record int64[A], counted within the batch; group int64[A], likewise; sample int64[A],
        number of the record in its group; mask bool[A]; rollout_logp float32[A]. The training
        program adds others.
    flat: the layout, if flat.
    positions: int64[rows, W], if shared; otherwise the model counts them itself.
    mask: float32[rows, 1, W, W], if shared: 0 where a token sees another, else the least float.
    images: of each record, in order; empty when none has any.
    uses: float32[rows W], how many records each place serves: a prompt's token those of its row, a
        completion's 1, padding 0. None if flat.
    routing: int16[rows W, L, k], the experts of each place; None unless every record has the
        column, or if flat. See ``gcore_language.routing``.
    """

    ids: Tensor
    predict: Tensor
    targets: Tensor
    temperature: Tensor | None
    index: np.ndarray
    columns: dict[str, Tensor]
    flat: FlatLayout | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    images: tuple[Images | None, ...] = ()
    uses: Tensor | None = None
    routing: Tensor | None = None


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates ``arange(starts[i], starts[i] + lengths[i])`` over all i.

    starts, lengths: int64[n]. Returns int64[sum(lengths)]: starts (5, 0) with lengths (2, 3) give
    5 6 0 1 2.
    """
    ends = np.cumsum(lengths)
    count = ends[-1] if len(ends) else 0
    indices: np.ndarray = np.arange(count) + np.repeat(starts - (ends - lengths), lengths)
    return indices


def counts_of(numbers: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Returns how often each of the numbers 0..``count`` - 1 occurs: int64[count].

    numbers: int64[n], each below ``count``.
    weights: float64[n], added up in place of ones; the counts are then float64.

    ``torch.bincount`` does the same, but not in a deterministic run on a GPU.
    """
    if weights is None:
        weights = torch.ones_like(numbers)
    return weights.new_zeros(count).index_add_(0, numbers, weights)


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Splits samples into runs of neighbours that have the same ordinal and the same prompt.

    Where records have the experts of their tokens, the prompt's are the same too.
    """
    groups: list[list[Sample]] = []
    last: tuple[int, bytes, bytes] | None = None
    for sample in samples:
        experts = sample.columns.get(ROUTING)
        of_prompt = b"" if experts is None else experts[: len(sample.prompt)].tobytes()
        key = (sample.ordinal, sample.prompt.tobytes(), of_prompt)
        if key != last:
            groups.append([])
            last = key
        groups[-1].append(sample)
    return groups


def cheapest_layout(samples: Sequence[Sample], hidden_size: int) -> Layout:
    """Returns the cheaper of "shared" and "padded" for these samples.

    The estimate counts multiplications of a layer in units of the hidden size D: 12 D for each
    token, and 2 for each pair of tokens that attention visits. With a 4-D mask attention visits all
    pairs of a row; a causal one visits half of them.
    """
    shared = padded = 0.0
    for group in group_samples(samples):
        prompt = len(group[0].prompt)
        row = prompt + sum(s.fed for s in group)
        shared += 12 * row * hidden_size + 2 * row * row
        padded += sum(12 * (prompt + s.fed) * hidden_size + (prompt + s.fed) ** 2 for s in group)
    return "shared" if shared < padded else "padded"


def micro_batches(
    samples: Sequence[Sample],
    layout: Layout,
    budget_tokens: int,
    device: torch.device,
    *,
    steady: bool = False,
    whole_groups: bool = False,
) -> Iterator[Batch]:
    """Yields batches that together hold every sample exactly once.

    A batch has at most ``budget_tokens`` tokens, padding included; a sample that alone has more
    than that gets a batch of its own.

    steady: see ``build``.
    whole_groups: whether all samples of one ordinal go into one batch. A group that alone has more
        than the budget gets a batch of its own.
    """
    rows = rows_of(samples, layout, budget_tokens)
    batch_rows: list[list[Sample]] = []
    fill = _Fill()
    for unit in _rows_by_group(rows) if whole_groups else [[row] for row in rows]:
        fuller = fill.plus_all(unit)
        if batch_rows and not fuller.fits(layout, budget_tokens, steady=steady):
            yield build(batch_rows, layout, device, steady=steady)
            batch_rows = []
            fuller = _Fill().plus_all(unit)
        fill = fuller
        batch_rows += unit
    if batch_rows:
        yield build(batch_rows, layout, device, steady=steady)


def _rows_by_group(rows: Sequence[list[Sample]]) -> list[list[list[Sample]]]:
    """Puts the rows of one ordinal together; groups come in the order of their first rows."""
    units: dict[int, list[list[Sample]]] = {}
    for row in rows:
        units.setdefault(row[0].ordinal, []).append(row)
    return list(units.values())


def steady_batches(
    samples: Sequence[Sample],
    layouts: Set[Layout],
    budget_tokens: int,
    device: torch.device,
    *,
    whole_groups: bool = False,
) -> Iterator[Batch]:
    """Yields ``steady`` batches that together hold every sample exactly once; see ``build``.

    A record's layout follows from its own length, so that it is the same in any company.

    short   flat, many to a batch. A batch ends before its longest prompt and its longest completion
            together would have more than ``STEADY_KEYS`` keys.
    long    padded, one to a batch: its tensors have the same shapes wherever it is, and so the same
            kernels. A pass of so many tokens keeps a processor busy without others.

    A model that does not go through the layout flat has its records padded together, whatever their
    length; their last bits depend on their company.

    layouts: those that may be used; "shared" only stands in for padded.
    whole_groups: whether all samples of one ordinal go into one batch; a group with a long record
        is then long as a whole.
    """
    layout: Layout = "padded" if "padded" in layouts else "shared"
    whole = whole_groups
    if "flat" not in layouts:
        yield from micro_batches(
            samples, layout, budget_tokens, device, steady=True, whole_groups=whole
        )
        return
    rows = [[sample] for sample in samples]
    units = _rows_by_group(rows) if whole else [[row] for row in rows]
    is_short = [all(is_steady(len(s.prompt), s.fed) for row in unit for s in row) for unit in units]
    short = [row[0] for unit, fits in zip(units, is_short, strict=True) if fits for row in unit]
    yield from micro_batches(short, "flat", budget_tokens, device, steady=True, whole_groups=whole)
    for unit, fits in zip(units, is_short, strict=True):
        if not fits:
            yield build(unit, layout, device, steady=True)


def steady_width(tokens: int) -> int:
    """Returns to how many tokens a row of so many is padded in a ``steady`` batch."""
    return _rounded(tokens, _STEADY_TOKENS)


def is_steady(prompt: int, fed: int) -> bool:
    """Returns whether rows with so long prompts and completions may share a steady flat batch.

    prompt, fed: tokens of the longest prompt, and of the longest completion that are fed.
    """
    return steady_width(prompt) + steady_width(fed) <= STEADY_KEYS


def rows_of(samples: Sequence[Sample], layout: Layout, budget_tokens: int) -> list[list[Sample]]:
    """Returns the rows of a layout, which together hold every sample once.

    Unless the layout is flat they come from wide to narrow, so that neighbours need little padding.
    """
    rows = list(_rows(samples, layout, budget_tokens))
    if layout != "flat":
        rows.sort(key=width_of, reverse=True)
    return rows


def build(
    rows: Sequence[Sequence[Sample]], layout: Layout, device: torch.device, *, steady: bool = False
) -> Batch:
    """Returns the batch of these rows.

    steady: whether a record's log-probs must not depend on the other records of the batch. Its
        tensors then lie where torch would put them, see ``alignment``, and rows are padded to whole
        vectors of a processor. It is known to suffice for the layout flat, where it is tested.
    """
    multiple = _STEADY_TOKENS if steady else 1
    make = {"flat": _flat, "shared": _shared, "padded": _padded}[layout]
    batch = make(rows, device, multiple)
    return aligned(batch) if steady else batch


def in_one_row(samples: Sequence[Sample], device: torch.device) -> Batch:
    """Returns a batch of whole records, one after another in a single row.

    Positions, int64[1, N], begin anew with each record, which is how attention knows where one
    ends. No layout: the attention of a model as it is would see the records before.
    """
    rows = [[sample] for sample in samples]
    sizes = _Sizes.of(rows)
    lengths = sizes.prompt + sizes.fed
    first = np.cumsum(lengths) - sizes.fed
    parts = [part for s in samples for part in (s.prompt, s.columns["action_ids"][:-1])]
    ids = np.concatenate(parts).astype(np.int64)[None]
    positions = ragged(np.zeros_like(lengths), lengths)[None]
    return _batch(
        rows,
        sizes,
        first - 1,
        first,
        device,
        ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(positions).to(device),
    )


def stand_in(device: torch.device) -> Batch:
    """Returns a batch of one action, for ranks that have no batch where other ranks have one.

    Collective operations need every rank to take part.
    """
    columns: dict[str, np.ndarray] = {
        "action_ids": np.zeros(1, np.int32),
        "action_mask": np.zeros(1, np.uint8),
        "logp": np.zeros(1, np.float32),
        "temperature": np.ones((), np.float32),
    }
    sample = Sample(index=0, ordinal=0, prompt=np.zeros(1, np.int32), columns=columns)
    return next(micro_batches([sample], "padded", 1, device))


def width_of(row: Sequence[Sample]) -> int:
    """Returns how many tokens a row has: the prompt once, then what is fed of each completion."""
    return len(row[0].prompt) + sum(s.fed for s in row)


def _rows(samples: Sequence[Sample], layout: Layout, budget_tokens: int) -> Iterator[list[Sample]]:
    # padded: a row for each sample. Others: a row for each group, cut where it would be too long;
    # the prompt is then repeated in each row.
    if layout == "padded":
        yield from ([s] for s in samples)
        return
    limit = min(budget_tokens, _SHARED_ROW_TOKENS) if layout == "shared" else budget_tokens
    for group in group_samples(samples):
        row: list[Sample] = []
        width = prompt = len(group[0].prompt)
        for sample in group:
            fed = sample.fed
            if row and width + fed > limit:
                yield row
                row = []
                width = prompt
            row.append(sample)
            width += fed
        yield row


@dataclass(frozen=True)
class _Fill:
    """The sizes of a batch to which rows are being added.

    rows, records: how many there are.
    tokens: of all rows, without padding.
    widest: tokens of the longest row.
    prompt: tokens of the longest prompt.
    fed: tokens of the longest completion that go through the model.
    """

    rows: int = 0
    records: int = 0
    tokens: int = 0
    widest: int = 0
    prompt: int = 0
    fed: int = 0

    def plus(self, row: Sequence[Sample]) -> _Fill:
        """Returns the sizes with one more row."""
        prompt = len(row[0].prompt)
        fed = [sample.fed for sample in row]
        width = prompt + sum(fed)
        return _Fill(
            self.rows + 1,
            self.records + len(row),
            self.tokens + width,
            max(self.widest, width),
            max(self.prompt, prompt),
            max(self.fed, *fed),
        )

    def plus_all(self, rows: Sequence[Sequence[Sample]]) -> _Fill:
        """Returns the sizes with more rows."""
        fill = self
        for row in rows:
            fill = fill.plus(row)
        return fill

    def fits(self, layout: Layout, budget_tokens: int, *, steady: bool) -> bool:
        """Returns whether a batch may have these sizes; see ``micro_batches``."""
        if layout != "flat":
            return self.rows * self.widest <= budget_tokens
        if steady and not is_steady(self.prompt, self.fed):
            return False
        # flat has no padding among tokens, but its attention pads records to the longest one
        scores = self.records * self.fed * (self.prompt + self.fed)
        return self.tokens <= budget_tokens and scores <= _FLAT_SCORES


@dataclass(frozen=True)
class _Sizes:
    """The lengths in a batch of G rows and R records.

    prompt: int64[G], tokens of each row's prompt.
    fed: int64[R], tokens of each record's completion that go through the model.
    group: int64[R], the row of each record.
    """

    prompt: np.ndarray
    fed: np.ndarray
    group: np.ndarray

    @staticmethod
    def of(rows: Sequence[Sequence[Sample]]) -> _Sizes:
        return _Sizes(
            np.array([len(row[0].prompt) for row in rows]),
            np.array([s.fed for row in rows for s in row]),
            np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        )


def _batch(
    rows: Sequence[Sequence[Sample]],
    sizes: _Sizes,
    last_prompt: np.ndarray,
    completion: np.ndarray,
    device: torch.device,
    **layout: Tensor | FlatLayout | None,
) -> Batch:
    """Makes a batch: computes the fields that all layouts share, and passes the others on.

    last_prompt: int64[R], index of the hidden state at the end of each record's prompt, which
        predicts the first action.
    completion: int64[R], index of the hidden state at each record's first action; those of its
        other fed actions follow it.
    layout: the fields of ``Batch`` that depend on the layout.
    """
    samples = [s for row in rows for s in row]
    actions = sizes.fed + 1
    # action t is predicted by the state at action t - 1, and the first one by the prompt's end
    predict = ragged(completion - 1, actions)
    predict[np.cumsum(actions) - actions] = last_prompt
    temperature = np.repeat(
        np.array([float(s.columns["temperature"]) for s in samples], np.float32), actions
    )

    def gather(name: str, dtype: type) -> Tensor:
        return torch.from_numpy(
            np.concatenate([s.columns[name] for s in samples]).astype(dtype)
        ).to(device)

    ids = layout["ids"]
    if "flat" not in layout and isinstance(ids, Tensor):
        prompts = sizes.prompt[sizes.group]
        places = ragged(
            np.stack([last_prompt - prompts + 1, completion], 1).reshape(-1),
            np.stack([prompts, sizes.fed], 1).reshape(-1),
        )
        experts = [s.columns.get(ROUTING) for s in samples]
        layout |= lay_routing(experts, places, width=ids.numel(), device=device)
    group = np.unique([s.ordinal for s in samples], return_inverse=True)[1]
    columns = {
        "record": torch.from_numpy(np.repeat(np.arange(len(samples)), actions)).to(device),
        "group": torch.from_numpy(np.repeat(group, actions)).to(device),
        "sample": torch.from_numpy(np.repeat([s.number for s in samples], actions)).to(device),
        "mask": gather("action_mask", np.bool_),
        "rollout_logp": gather("logp", np.float32),
    }
    return Batch(
        predict=torch.from_numpy(predict).to(device),
        targets=gather("action_ids", np.int64),
        temperature=None if (temperature == 1).all() else torch.from_numpy(temperature).to(device),
        index=np.array([s.index for s in samples]),
        columns=columns,
        images=tuple(s.images for s in samples) if any(s.images for s in samples) else (),
        **layout,
    )


def _flat(rows: Sequence[Sequence[Sample]], device: torch.device, multiple: int) -> Batch:
    """Builds a flat batch: the tokens of all prompts, then what is fed of all completions.

    multiple: rows of the attention are padded to a multiple of so many tokens.
    """
    sizes = _Sizes.of(rows)
    prompts = sizes.prompt
    fed = sizes.fed
    group = sizes.group
    prompt_start = np.cumsum(prompts) - prompts
    fed_start = prompts.sum() + np.cumsum(fed) - fed
    ids = np.concatenate(
        [row[0].prompt for row in rows]
        + [s.columns["action_ids"][:-1] for row in rows for s in row]
    ).astype(np.int64)
    positions = np.concatenate(
        [ragged(np.zeros_like(prompts), prompts), ragged(prompts[group], fed)]
    )
    prompt_at, prompt_real = _grid(prompt_start, prompts, multiple)
    width = prompt_at.shape[1]
    blocks = [_block(prompt_at, prompt_at, np.tri(width, dtype=bool)[None], prompt_real, device)]
    if fed.any():
        fed_at, fed_real = _grid(fed_start, fed, multiple)
        # one mask does for all rows if all prompts have one length
        first = group[:1] if (prompts == prompts[0]).all() else group
        shape = (len(first), fed_at.shape[1], width)
        prompt_visible = np.broadcast_to((np.arange(width) < prompts[first, None])[:, None], shape)
        completion_visible = np.broadcast_to(
            np.tri(shape[1], dtype=bool), (shape[0], shape[1], shape[1])
        )
        keys = np.concatenate([prompt_at[group], fed_at], 1)
        blocks.append(
            _block(
                fed_at,
                keys,
                np.concatenate([prompt_visible, completion_visible], 2),
                fed_real,
                device,
            )
        )
    members = (group == np.arange(len(rows))[:, None]).astype(np.float32)
    predicting = np.concatenate([prompt_start + prompts - 1, prompts.sum() + np.arange(fed.sum())])
    layout = FlatLayout(
        positions=torch.from_numpy(positions).to(device),
        prompts=blocks[0],
        completions=blocks[1] if len(blocks) > 1 else None,
        members=torch.from_numpy(members).to(device),
        predicting=torch.from_numpy(predicting).to(device),
    )
    # counted over the predicting tokens: each prompt's last one, then the completions
    first_fed = len(rows) + np.cumsum(fed) - fed
    return _batch(
        rows, sizes, group, first_fed, device, ids=torch.from_numpy(ids).to(device), flat=layout
    )


def _grid(starts: np.ndarray, lengths: np.ndarray, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token indexes as rows padded to the longest one, and where they are not padding.

    multiple: rows have a multiple of so many tokens.

    starts, lengths: int64[rows]. The first result, int64[rows, longest], is starts[i] + j while j <
    lengths[i], then 0; the second, bool[rows, longest], is true where j < lengths[i].
    """
    steps = np.arange(_rounded(lengths.max(), multiple))
    is_token = steps < lengths[:, None]
    return np.where(is_token, starts[:, None] + steps, 0), is_token


def _rounded(length: int, multiple: int) -> int:
    """Returns a length, rounded up to a multiple."""
    return -(-int(length) // multiple) * multiple


def _block(
    queries: np.ndarray,
    keys: np.ndarray,
    visible: np.ndarray,
    is_token: np.ndarray,
    device: torch.device,
) -> Block:
    """Makes a block of the flat layout.

    queries: int64[B, Q], token indexes; keys: int64[B, T], likewise.
    visible: bool[B or 1, Q, T], whether a query sees a key.
    is_token: bool[B, Q], false for padded queries.
    """
    bias = np.where(visible, np.float32(0), np.float32(-np.inf))[:, :, None]
    return Block(
        queries=torch.from_numpy(queries).to(device),
        keys=torch.from_numpy(keys).to(device),
        unpadded=torch.from_numpy(is_token.reshape(-1).nonzero()[0]).to(device),
        bias=torch.from_numpy(bias).to(device),
        is_query=None
        if is_token.all()
        else torch.from_numpy(is_token[:, :, None, None].astype(np.float32)).to(device),
    )


def _shared(rows: Sequence[Sequence[Sample]], device: torch.device, multiple: int) -> Batch:
    """Builds a batch with a row for each group, or for a part of one.

    multiple: rows are padded to a multiple of so many tokens.
    """
    sizes = _Sizes.of(rows)
    width = _rounded(max(map(width_of, rows)), multiple)
    ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segment = np.full((len(rows), width), -1)  # 0 is the prompt, 1.. the completions, -1 padding
    completion = []
    for i, row in enumerate(rows):
        at = len(row[0].prompt)
        ids[i, :at] = row[0].prompt
        positions[i, :at] = np.arange(at)
        segment[i, :at] = 0
        for j, sample in enumerate(row):
            completion.append(i * width + at)
            span = slice(at, at + sample.fed)
            ids[i, span] = sample.columns["action_ids"][:-1]
            positions[i, span] = len(row[0].prompt) + np.arange(sample.fed)
            segment[i, span] = j + 1
            at += sample.fed
    # a token sees its own segment and the prompt, and of both only what does not come after it
    visible = (segment[:, None, :] == segment[:, :, None]) | (segment[:, None, :] == 0)
    mask = np.where(visible & np.tri(width, dtype=bool), np.float32(0), np.finfo(np.float32).min)[
        :, None
    ]
    last_prompt = (np.arange(len(rows)) * width + sizes.prompt - 1)[sizes.group]
    return _batch(
        rows,
        sizes,
        last_prompt,
        np.array(completion),
        device,
        ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


def _padded(rows: Sequence[Sequence[Sample]], device: torch.device, multiple: int) -> Batch:
    """Builds a batch with a row for each record.

    multiple: rows are padded to a multiple of so many tokens.
    """
    sizes = _Sizes.of(rows)
    width = _rounded((sizes.prompt + sizes.fed).max(), multiple)
    ids = np.zeros((len(rows), width), np.int64)
    for i, (sample,) in enumerate(rows):
        prompt = len(sample.prompt)
        end = len(sample.prompt) + sample.fed
        ids[i, :prompt] = sample.prompt
        ids[i, prompt:end] = sample.columns["action_ids"][:-1]
    first = np.arange(len(rows)) * width + sizes.prompt
    return _batch(rows, sizes, first - 1, first, device, ids=torch.from_numpy(ids).to(device))
