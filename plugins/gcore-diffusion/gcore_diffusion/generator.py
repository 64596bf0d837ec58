"""The provider ``diffusion`` of kind generator: it denoises batches of samples.

A record keeps what a trainer needs to compute its transitions again. Columns of a record, with A
stochastic steps of T and latents of shape D:

    logp         float32[A]          log-prob of each transition, mean over dimensions
    action_mask  uint8[A]            always 1
    steps        int16[A]            numbers of the stochastic steps, which follow each other
    levels       float32[T + 1]      noise levels of the schedule, as the sampler had it
    times        float32[T]          time input of the model at each step
    noise        int8[]              index of the kind of noise in ``NOISES``
    scale        float32[]           how much noise
    guidance     float32[]           classifier-free guidance
    latents      float32[A + 1, *D]  before each stochastic step and after the last; absent when A is 0
    clean        float32[*D]         the clean latent

Media of a record: ``image`` uint8[H, W, C], and ``condition``, which is what the model takes for
the prompt (see ``conditions``), stored once for all records of that prompt.

A greedy record is drawn by the deterministic sampler from its seed's noise, so it has no actions.
"""  # noqa: E501

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash
from gcore_language.inbox import WeightInbox
from gcore_language.models import choose_device, refuse_engine
from gcore_language.weights import copy_bytes, spec_of, to_bytes

from gcore_core.contract.columns import Columns
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError, DataError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, FINISHED, TensorSpec, WeightPlan
from gcore_diffusion.conditions import stacked, to_array
from gcore_diffusion.config import DiffusionGeneratorConfig, Noise
from gcore_diffusion.kernel import Kernel
from gcore_diffusion.models import autocast, open_denoiser, pushed_tensors
from gcore_diffusion.way import SeededNoise, Way, window_of

NOISES: tuple[str, ...] = typing.get_args(Noise)
_KEPT_PROMPTS = 4096


class DiffusionGenerator:
    """See ``gcore_core.contract.generator.Generator``.

    One call of ``step`` denoises one batch from noise to pictures.
    """

    def __init__(self, config: DiffusionGeneratorConfig, context: WorkerContext) -> None:
        refuse_engine(context)
        self._config = config
        self._context = context
        self._device = choose_device(config.device, context, config.threads)
        self._denoiser = open_denoiser(config, context, self._device, sampling=True)
        self._kernel = Kernel(
            noise=config.noise, scale=config.scale, prediction=self._denoiser.prediction
        )
        check_noise(self._kernel, context)
        self._dims = self._denoiser.dims(config)
        self._tensors = pushed_tensors(self._denoiser.module, config)
        self._inbox = WeightInbox(
            context.role, {n: tuple(t.shape) for n, t in self._tensors.items()}
        )
        self._queue: list[SampleRequest] = []
        # key of a prompt -> its condition; emptied when there are more than _KEPT_PROMPTS
        self._conditions: dict[str, dict[str, np.ndarray]] = {}

    @property
    def version(self) -> int:
        return self._inbox.version

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See ``Generator.submit``. Greedy requests wait until the others are done."""
        self._queue += requests
        self._queue.sort(key=lambda r: (r.greedy, r.ordinal, r.sample))

    def step(self) -> list[Finished]:
        """See ``Generator.step``. Either all records of a batch are greedy, or none is."""
        if not self._queue:
            return []
        self._inbox.check_idle()
        self._context.progress()
        greedy = self._queue[0].greedy
        count = next((i for i, r in enumerate(self._queue) if r.greedy != greedy), len(self._queue))
        count = min(count, self._config.max_batch)
        batch = self._queue[:count]
        self._queue = self._queue[count:]
        # keyed by id(request): a prompt that cannot be read fails its requests alone
        failed = self._encode(batch)
        encoded = [request for request in batch if id(request) not in failed]
        return [*failed.values(), *(self._denoise(encoded, greedy) if encoded else [])]

    def _encode(self, requests: Sequence[SampleRequest]) -> dict[int, Finished]:
        """Encodes the prompts that are not encoded yet, and remembers them.

        Returns a failed record for each request whose prompt cannot be read, by the request's id.
        """
        failed = {}
        if len(self._conditions) > _KEPT_PROMPTS:
            self._conditions.clear()
        for request in requests:
            key = _key(request)
            try:
                if key not in self._conditions:
                    (self._conditions[key],) = self._denoiser.encode([request.prompt])
            except DataError as error:
                failed[id(request)] = self._finished(request, FAILED, {}, reason=error.what)
        return failed

    @torch.no_grad()
    def _denoise(self, requests: Sequence[SampleRequest], greedy: bool) -> list[Finished]:
        """Denoises one batch; returns its records, which hold the columns of the module's table."""
        config = self._config
        # a greedy sample has no stochastic steps
        window = range(0) if greedy else window_of(config, self.version, self._context.seed)
        noise = SeededNoise([request.seed for request in requests], self._device)
        first = noise.draw(self._dims)
        if config.same_noise and not greedy:
            # samples of one prompt have one ordinal, and so the same first noise
            ordinals = [request.ordinal for request in requests]
            first = SeededNoise(
                [self._context.seed + ordinal for ordinal in ordinals], self._device
            ).draw(self._dims)
        way = Way(self._kernel, config.steps, window, first, noise)
        condition = stacked([self._conditions[_key(request)] for request in requests], self._device)
        with autocast(config, self._device):
            clean, images = self._denoiser.sample(condition, way, config)
        arrays = {"clean": clean.float().cpu().numpy()}
        if way.logp:
            arrays["latents"] = torch.stack(way.latents, 1).cpu().numpy()
            arrays["logp"] = torch.stack(way.logp, 1).cpu().numpy()
        else:
            arrays["logp"] = np.zeros((len(requests), 0), np.float32)
        shared_columns = {
            "action_mask": np.ones(len(window), np.uint8),
            "steps": np.arange(window.start, window.stop, dtype=np.int16),
            "levels": way.schedule.levels.float().cpu().numpy(),
            "times": way.schedule.times.float().cpu().numpy(),
            "noise": np.array(NOISES.index(config.noise), np.int8),
            "scale": np.array(config.scale, np.float32),
            "guidance": np.array(config.guidance, np.float32),
        }
        packed = {
            key: to_array(self._conditions[key]) for key in {_key(request) for request in requests}
        }
        return [
            self._finished(
                request,
                FINISHED,
                {**shared_columns, **{name: array[i] for name, array in arrays.items()}},
                media={"condition": packed[_key(request)], "image": images[i]},
            )
            for i, request in enumerate(requests)
        ]

    def _finished(
        self,
        request: SampleRequest,
        status: str,
        columns: Columns,
        *,
        reason: str = "",
        media: Columns | None = None,
    ) -> Finished:
        versions = (self.version, self.version)
        return Finished(
            request=request,
            status=status,
            versions=versions,
            columns=columns,
            reason=reason,
            media=media or {},
        )

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Raises ContractError: a sample ends in the step in which it begins, so no sample is ever
        partial.
        """
        raise ContractError(
            "a batch is denoised in one step, so no sample can be ended early", where="abort"
        )

    def close(self) -> None:
        self._queue.clear()
        self._denoiser.close()

    # -- weights -----------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``. Tensors of another dtype are converted."""
        self._inbox.begin(plan)

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        for spec, array in self._inbox.take(tensors):
            copy_bytes(self._tensors[spec.name], spec, array)

    def commit_weights(self, plan: WeightPlan) -> None:
        self._inbox.complete()
        self._inbox.commit(plan.version)

    def fingerprint(self) -> dict[str, int]:
        """See ``Fingerprints.fingerprint``."""
        return {
            name: xxhash.xxh3_64_intdigest(to_bytes(self._tensors[name]).data)
            for name in sorted(self._tensors)
        }

    def weight_specs(self) -> list[TensorSpec]:
        """Returns every tensor of a push, with the dtype in which this generator holds it."""
        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]


def _key(request: SampleRequest) -> str:
    """Returns what tells one condition from another: row, text and class label of a prompt."""
    prompt = request.prompt
    return f"{prompt.row}\n{prompt.text}\n{prompt.fields.get('label', '')}"


def check_noise(kernel: Kernel, context: WorkerContext) -> None:
    """Raises ConfigError unless the kind of noise goes with what the model predicts.

    ddim goes with models that predict epsilon or v; sde, dance and cps go with flow.
    """
    flow = kernel.prediction == "flow"
    if flow == (kernel.noise == "ddim"):
        kinds = "sde, dance and cps" if flow else "ddim"
        raise ConfigError(
            f"noise {kernel.noise} does not go with a model that predicts {kernel.prediction}.",
            where=f"roles.{context.role}.config.noise",
            todo=f"Use {kinds}.",
        )
