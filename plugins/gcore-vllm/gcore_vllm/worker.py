"""Adds to vLLM's worker the loading of weights that come in pieces, and log-probs of all tokens.

vLLM rearranges weights for its kernels when they are loaded, and on CPUs frees the originals, so
plain ``model.load_weights`` fails there. Its layerwise reload gives every layer its original layout
back, takes the tensors and rearranges the layer when the last of them has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from gcore_language.weights import from_bytes
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from gcore_core.contract.records import TensorSpec


class WorkerExtension:
    """Mixed into vLLM's worker class; methods are called by ``collective_rpc``, on every device."""

    vllm_config: Any
    model_runner: Any
    _gcore_loaded: Any = None  # set[str] of parameters, during a push

    def gcore_begin_weights(self) -> None:
        """Gives all layers their original layout.

        From here on the engine cannot run until ``gcore_commit_weights``.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            # An earlier push broke off: its reload is ended, and this push overwrites what it left.
            if self._gcore_loaded is not None:
                finalize_layerwise_reload(model, self.model_runner.model_config)
            initialize_layerwise_reload(model)
        self._gcore_loaded = set()

    def gcore_device(self) -> torch.device:
        """Returns the device on which the model is."""
        return torch.device(self.model_runner.device)

    def gcore_load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray | Tensor]]) -> None:
        """Loads some tensors of the push.

        Each tensor is copied, because a layer keeps its tensors until the last of them has come.
        """
        named_weights = ((spec.name, from_bytes(spec, array)) for spec, array in tensors)
        with set_current_vllm_config(self.vllm_config):
            self._gcore_loaded |= set(self.model_runner.get_model().load_weights(named_weights))

    def gcore_commit_weights(self) -> list[str]:
        """Ends the push; returns the parameters that nothing was loaded into."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
            _rearrange_tied(model)
        # with an adapter a layer lies in another one, as its `base_layer`, which the names of
        # tensors leave out
        parameters = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        untouched = parameters - self._gcore_loaded
        self._gcore_loaded = None
        return sorted(untouched)

    def gcore_divide_logits(self, temperature: float) -> None:
        """Has the model divide its logits by a temperature; 1 ends it.

        vLLM gives log-probs of prompts at temperature 1 alone.
        """
        model = self.model_runner.get_model()
        vars(model).pop("compute_logits", None)
        if temperature != 1:
            compute_logits = model.compute_logits
            model.compute_logits = lambda *arguments: compute_logits(*arguments) / temperature

    def gcore_log_probs_of_all_tokens(self, never: list[int]) -> None:
        """Has the sampler take log-probs before anything narrows the choice.

        vLLM by itself takes them after top-k and top-p.

        never: ids that are not to be sampled.
        """
        sampler = self.model_runner.sampler
        ids = torch.tensor(never, dtype=torch.int64, device=self.model_runner.device)
        sampler.topk_topp_sampler = _AllTokens(sampler.topk_topp_sampler, ids)
        if never:
            likeliest = sampler.greedy_sample
            sampler.greedy_sample = lambda logits: likeliest(_without(logits, ids))


def _without(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns a copy of logits [B, V] in which some ids have no probability."""
    return logits.index_fill(-1, ids, -torch.inf)


class _AllTokens(torch.nn.Module):
    """Narrows the choice as vLLM's TopKTopPSampler does, and takes log-probs before it.

    narrowing: vLLM's sampler.
    never: ids that are not to be sampled, int64[N].
    """

    def __init__(self, narrowing: torch.nn.Module, never: Tensor) -> None:
        super().__init__()
        self.narrowing = narrowing
        self.never = never

    def forward(
        self,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (tokens int64[B], log-probs float32[B, V] of all logits [B, V])."""
        logp = logits.log_softmax(dim=-1, dtype=torch.float32)  # first: narrowing works in place
        if len(self.never):
            logits = _without(logits, self.never)
        return self.narrowing(logits, generators, k, p)[0], logp


def _rearrange_tied(model: torch.nn.Module) -> None:
    """Rearranges the weights that two layers share, for both of them.

    The reload does so only for the layer that the tensor was named after. On CPUs the other one,
    the output layer of a model with tied embeddings, would go on with a rearranged copy of the old
    weights (vLLM 0.32).
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for module in {module for modules in owners.values() if len(modules) > 1 for module in modules}:
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
