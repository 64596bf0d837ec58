"""Gives log-probs of the policy's actions under a frozen Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_language.alignment import align
from gcore_language.cut_records import CutRecords
from gcore_language.images import Images
from gcore_language.model_files import ModelFiles, open_model_files
from gcore_language.models import choose_device, load_model, refuse_engine
from gcore_language.packing import (
    FLAT_ROW_TOKENS,
    Batch,
    Layout,
    Sample,
    cheapest_layout,
    micro_batches,
    steady_batches,
)
from gcore_language.policy import Policy, check_layouts
from gcore_language.prompts import ids_without_token, load_tokenizer
from gcore_language.vocabularies import tokenizer_difference

from gcore_algorithms.teacher.checks import refusal
from gcore_algorithms.teacher.config import TOP_IDS, TOP_LOGP, FrozenModelConfig
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.trainer import TrainRecord


class FrozenModel:
    """One worker of a role ``reference`` or ``teacher``; see ``Annotator``.

    Log-probs are what the torch trainer computes: the same packings, at each record's temperature.
    In a deterministic run they are, in float32 on a CPU, the trainer's to the last bit, for records
    that go through the layout "flat"; their numbers do not depend on their company.

    A role that gives ``ref_logp`` takes the policy's own model where it has none: that with which
    the run began.
    """

    def __init__(self, config: FrozenModelConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config = config
        self._context = context
        self._role = context.role
        refuse_engine(context)
        self._is_steady = context.deterministic
        files = self._open_files()
        self._path = str(files.directory)
        self._device = choose_device(config.device, context, config.threads, self._path)
        policy_files = self._policy_files()
        self._check_tokenizers(files, policy_files)
        self._embedded = _embedded(files)
        self._known = min(self._embedded, self._with_token(policy_files or files))
        self._check_top_k()
        self._check_memory(files)
        self._policy = self._open(self._path)

    # -- opening -----------------------------------------------------------------------------------

    def _open_files(self) -> ModelFiles:
        """Looks at the model's files. Raises ConfigError for a teacher without a model."""
        context = self._context
        if context.model:
            return open_model_files(context)
        if "ref_logp" not in context.columns or not context.policy:
            raise ConfigError(
                "no model is given.",
                where=f"roles.{self._role}.model",
                why="It is another model than the policy.",
                todo="Give its path, as in model: {path: org/model}.",
            )
        return open_model_files(context, str(context.policy["path"]))

    def _policy_files(self) -> ModelFiles | None:
        """Looks at the files of the policy's model; None where no policy is known."""
        path = self._context.policy.get("path")
        return open_model_files(self._context, str(path)) if path else None

    def _check_tokenizers(self, files: ModelFiles, policy: ModelFiles | None) -> None:
        """Raises DataError where the same ids are other texts to this model and to the policy."""
        if policy is None or _same(files.directory, policy.directory):
            return
        own, other = (self._tokenizer(one) for one in (files, policy))
        if differs := tokenizer_difference(other, own):
            raise DataError(
                refusal(self._role, differs), where=f"roles.{self._role}.model: {self._path}"
            )

    def _with_token(self, files: ModelFiles) -> int:
        """Returns how many ids of a model, from the first on, may be among the likeliest.

        Those behind its tokenizer's last token are not: no sample has them.
        """
        embedded = _embedded(files)
        if TOP_IDS not in self._context.columns:
            return embedded
        without = set(ids_without_token(self._tokenizer(files), embedded, ()))
        return next(known for known in range(embedded, -1, -1) if known - 1 not in without)

    def _tokenizer(self, files: ModelFiles) -> Any:
        return load_tokenizer(
            str(files.directory),
            None,
            trust_remote_code=self._config.trust_remote_code,
        )

    def _check_top_k(self) -> None:
        """Raises ConfigError for more likeliest tokens than there are."""
        if TOP_IDS in self._context.columns and self._config.top_k > self._known:
            raise ConfigError(
                f"{self._config.top_k} likeliest tokens are more than the {self._known} that both "
                "models have.",
                where=f"roles.{self._role}.config.top_k",
            )

    def _check_memory(self, files: ModelFiles) -> None:
        """Raises ConfigError where an accelerator has less free memory than the weights take.

        The role's memory is its own for the whole run, beside whatever shares the device.
        """
        if self._device.type != "cuda":
            return
        needed = _numbers(files) * (4 if self._config.dtype == "float32" else 2)
        free, _ = torch.cuda.mem_get_info(self._device)
        if needed > free:
            raise ConfigError(
                f"the weights take {needed / 2**30:.1f} GiB, and device {self._device} has "
                f"{free / 2**30:.1f} GiB free.",
                where=f"roles.{self._role}",
                why="What shares the device with this role keeps its own memory.",
                todo="Give the role a device of its own, a smaller dtype, or a smaller model.",
            )

    def _open(self, path: str) -> Policy:
        """Opens a model as the trainer opens its own, and finds the packings that suit it."""
        config = self._config
        model = load_model(
            path,
            dtype=config.dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            images=True,
        ).to(self._device)
        if self._is_steady:
            align(model)
        policy = Policy(model)
        policy.requires_grad_(False)
        exact = config.dtype == "float32"
        check_layouts(
            policy,
            self._device,
            may_flat=exact and self._device.type == "cpu" and config.packing != "padded",
            tolerance=1e-4 if exact else 5e-2,
        )
        if config.rest == "host":
            policy.to("cpu")
        return policy

    # -- annotating --------------------------------------------------------------------------------

    def annotate(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        """Returns the role's columns of each record; see ``Annotates.annotate``.

        Raises DataError for a log-prob that is not finite, and for a token that this model lacks.
        """
        self._check_ids(records)
        cut = CutRecords.of(records)
        of_rows = self._annotate_rows(cut.rows)
        joined = {name: cut.join([own[name] for own in of_rows]) for name in self._context.columns}
        return [
            {name: column[place] for name, column in joined.items()}
            for place in range(len(records))
        ]

    def _annotate_rows(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        answers: list[Mapping[str, np.ndarray]] = [self._empty() for _ in records]
        samples = [
            Sample(
                index=place,
                ordinal=record.ordinal,
                prompt=record.columns["prompt_ids"],
                columns=record.columns,
                images=Images.of(record.columns, record.media),
            )
            for place, record in enumerate(records)
            if len(record.columns["action_ids"])
        ]
        # neighbours with one prompt share it
        samples.sort(key=lambda sample: (sample.ordinal, sample.prompt.tobytes()))
        if not samples:
            return answers
        with self._at_work():
            for batch in self._batches(samples):
                self._context.progress()
                for place, columns in self._of_batch(batch):
                    answers[place] = columns
        return answers

    def _check_ids(self, records: Sequence[TrainRecord]) -> None:
        """Raises DataError for an id beyond this model's embedding.

        A policy may embed more rows than its tokenizer has words, more than this model, and sample
        one of them.
        """
        for record in records:
            for name in ("prompt_ids", "action_ids"):
                most = int(record.columns[name].max(initial=0))
                if most >= self._embedded:
                    raise DataError(
                        f"a record has the token {most}, and the model embeds {self._embedded}.",
                        where=f"roles.{self._role}.model: {self._path}",
                        why=f"{name} of record {record.sample} of prompt {record.ordinal}: the "
                        "policy embeds rows without a word, and sampled one.",
                        todo=f"Take a {self._role} that embeds as many tokens as the policy.",
                    )

    def _empty(self) -> dict[str, np.ndarray]:
        """Returns the columns of a record without actions."""
        k = self._config.top_k
        columns = {
            TOP_IDS: np.zeros((0, k), np.int32),
            TOP_LOGP: np.zeros((0, k), np.float32),
        }
        one = np.zeros(0, np.float32)
        return {name: columns.get(name, one) for name in self._context.columns}

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Has the weights on the device; afterwards they lie where ``rest`` says."""
        if self._config.rest == "device":
            yield
            return
        self._policy.to(self._device)
        try:
            yield
        finally:
            self._policy.to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        """Packs the samples as a trainer of one rank does."""
        budget = self._config.budget_tokens
        if self._is_steady:
            return steady_batches(samples, self._allowed(), budget, self._device)
        return micro_batches(samples, self._layout(samples), budget, self._device)

    def _allowed(self) -> frozenset[Layout]:
        """Returns the layouts that settings and model allow."""
        layouts = self._policy.layouts
        if self._config.packing == "padded":
            return frozenset({"padded"})
        if self._config.packing == "shared_prompt" and layouts != {"padded"}:
            return layouts - {"padded"}
        return layouts

    def _layout(self, samples: Sequence[Sample]) -> Layout:
        """Returns the layout of a step's samples, as ``LanguageTrainer`` chooses it."""
        layouts = self._allowed()
        longest = max(len(s.prompt) for s in samples) + max(s.fed for s in samples)
        if "flat" in layouts and longest <= FLAT_ROW_TOKENS:
            return "flat"
        if layouts >= {"shared", "padded"}:
            width = int(self._policy.model.config.get_text_config().hidden_size)
            return cheapest_layout(samples, width)
        return "shared" if "shared" in layouts else "padded"

    def _of_batch(self, batch: Batch) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yields (place of a record, its columns) for each record of a batch."""
        columns = self._columns_of(batch)
        counts = torch.bincount(batch.columns["record"], minlength=len(batch.index))
        ends = np.cumsum(counts.cpu().numpy())[:-1]
        parts = {name: np.split(column, ends) for name, column in columns.items()}
        for at, place in enumerate(batch.index.tolist()):
            yield place, {name: part[at] for name, part in parts.items()}

    def _columns_of(self, batch: Batch) -> dict[str, np.ndarray]:
        """Returns the role's columns of a batch's actions, [A] and [A, k]."""
        made: dict[str, np.ndarray] = {}
        if TOP_IDS in self._context.columns:
            logp, ids, top = self._policy.likeliest(batch, self._config.top_k, self._known)
            made[TOP_IDS] = ids.cpu().numpy().astype(np.int32)
            made[TOP_LOGP] = top.cpu().numpy()
        else:
            with torch.no_grad():
                logp, _ = self._policy(batch)
        values = logp.float().cpu().numpy()
        for name in self._context.columns:
            made.setdefault(name, values)
        for name, column in made.items():
            if not np.isfinite(column).all():
                raise self._not_finite(name)
        return made

    def _not_finite(self, column: str) -> DataError:
        return DataError(
            f"a log-prob of {column} is not finite.",
            where=f"roles.{self._role}.model: {self._path}",
            why="Its weights hold NaN or infinity, or its numbers are too large for the dtype "
            f"{self._config.dtype}.",
            todo="Try dtype: float32; if that fails too, the weights are damaged.",
        )

    def close(self) -> None:
        del self._policy


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _embedded(files: ModelFiles) -> int:
    """Returns how many tokens a model embeds. Raises DataError where its config does not say."""
    if files.embedded is None:
        raise DataError("the model's config has no vocab_size.", where=str(files.directory))
    return files.embedded


def _numbers(files: ModelFiles) -> int:
    """Returns how many numbers a model's weights are."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in files.shapes.values())
