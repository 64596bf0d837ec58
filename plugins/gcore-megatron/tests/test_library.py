"""What is refused before ranks meet, and how they are laid out; with the real library."""

from __future__ import annotations

import importlib.metadata
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gcore_megatron.config import MegatronTrainerConfig

from gcore_core.contract.errors import ConfigError, DataError
from tests.support import language_models as tiny
from tests.support import megatron_trainers as tools
from tests.support.broken_models import make_directory

pytestmark = pytest.mark.engine


def test_the_imported_library_is_megatron_core() -> None:
    """Its module file is the distribution's, at the version whose sources the shim was written
    for.
    """
    import gcore_megatron.library  # noqa: F401  (first, for the shim)
    import megatron.core

    distribution = importlib.metadata.distribution("megatron-core")
    assert distribution.version.startswith("0.16.")
    assert distribution.version == importlib.metadata.version("megatron-core")
    files = {
        Path(str(distribution.locate_file(file))).resolve() for file in distribution.files or ()
    }
    assert Path(megatron.core.__file__).resolve() in files


def test_random_streams_are_independent_without_cuda() -> None:
    """Each goes on where it stopped, and the default stream does not notice. Unmended, a fork is
    silently nothing.
    """
    import gcore_megatron.library  # noqa: F401
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(1)
    outside = torch.rand(2)
    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("stream", 7)
    drawn = []
    for _ in range(2):
        with tracker.fork("stream"):
            drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), expected)
    assert torch.equal(torch.rand(2), outside)


ROTARY = {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "no model for the family 'gpt2'"),
        ({"hidden_act": "gelu"}, "no activation 'gelu'"),
        ({"mlp_bias": True}, "no biases in the feed-forward layers"),
        ({"attention_bias": True}, "no bias in the attention's output projection"),
        ({"model_type": "mistral", "sliding_window": 16}, "no sliding window, this model's is 16"),
        (
            {"rope_parameters": {**ROTARY, "rope_type": "dynamic", "factor": 2.0}},
            "no rotary embedding of type 'dynamic'",
        ),
        (
            {"rope_parameters": {**ROTARY, "partial_rotary_factor": 0.5}},
            r"rotary embeddings to whole heads, this model to a part of 0\.5",
        ),
        (
            {"intermediate_size": 48},
            r"down_proj\.weight is \[64, 96\] in the files and \[64, 48\] by config\.json",
        ),
        ({"num_hidden_layers": 3}, r"Missing: model\.layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 1}, r"Not used: model\.layers\.1\.input_layernorm\.weight"),
    ],
)
def test_an_unsupported_model_is_refused(
    models: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    from gcore_megatron.engine import MegatronEngine

    directory = tools.changed(models["llama"][0], tmp_path, **changes)
    context = tiny.make_context(directory, tools.make_objective("Cispo", {}))
    with pytest.raises(DataError, match=message):
        MegatronEngine(MegatronTrainerConfig(), context)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("a weight is NaN", "llama"),
        ("a tensor is missing", "llama"),
        ("a name is misspelled", "qwen2"),
        ("a tensor is shorter", "llama"),
        ("names are peft's", "qwen2"),
        ("weights are in 8 bits", "llama"),
        ("config.json ties what is two", "llama"),
        ("config.json parts what is one", "qwen2"),
        ("config.json says quantised", "qwen2"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    tmp_path: Path, kind: str, family: str
) -> None:
    from gcore_megatron.engine import MegatronEngine
    from gcore_megatron.library import parallel_state

    directory = make_directory(kind, tmp_path / "model", family=family)
    context = tiny.make_context(directory, tools.make_objective("Cispo", {}))
    try:
        with pytest.raises(DataError, match=str(directory)):
            MegatronEngine(MegatronTrainerConfig(), context)
    finally:
        if dist.is_initialized():  # numbers are seen when they are read, by ranks that have met
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (
            4,
            {"tensor_parallel": 4},
            r"policy\.config\.tensor_parallel: the model has 2 attention heads, which cannot be "
            "divided evenly among 4 slots",
        ),
        (
            3,
            {"pipeline_parallel": 3},
            r"policy\.config\.pipeline_parallel: the model has 2 layers, which cannot be "
            "divided evenly among 3 slots",
        ),
        (3, {"tensor_parallel": 2}, r"policy\.slots: 3 slots cannot be divided into replicas of 2"),
    ],
)
def test_an_impossible_split_is_refused_before_ranks_connect(
    models: dict[str, tuple[Path, Path]],
    ranks: int,
    settings: dict[str, Any],
    message: str,
) -> None:
    from gcore_megatron.engine import MegatronEngine

    context = tiny.make_context(models["llama"][0], tools.make_objective("Cispo", {}), ranks=ranks)
    with pytest.raises(ConfigError, match=message):
        MegatronEngine(MegatronTrainerConfig(**settings), context)
    assert not dist.is_initialized()


def test_neighbouring_ranks_form_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """rank // replica_slots is the data-parallel rank for every split of up to 16 ranks."""
    from gcore_megatron.engine import _join_groups
    from gcore_megatron.library import parallel_state as ps
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group

    def without_gloo(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **(kwargs | {"backend": None}))

    monkeypatch.setattr(dist, "new_group", without_gloo)
    for tensor, context, pipeline, data in itertools.product((1, 2), repeat=4):
        config = MegatronTrainerConfig(
            tensor_parallel=tensor, context_parallel=context, pipeline_parallel=pipeline
        )
        ranks = config.traits().replica_slots * data
        for rank in range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            _join_groups(config)
            place = rank % config.traits().replica_slots
            assert ps.get_data_parallel_rank() == rank // config.traits().replica_slots
            assert ps.get_tensor_model_parallel_rank() == place % tensor
            assert ps.get_context_parallel_rank() == place // tensor % context
            assert ps.get_pipeline_model_parallel_rank() == place // tensor // context
            ps.destroy_model_parallel()
            dist.destroy_process_group()
