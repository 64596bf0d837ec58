"""``compile: auto``, with torch.compile's own backend "eager": others need a compiler on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.context.settings import ContextSettings
from gcore_language.models import load_model
from gcore_torch import compiling
from gcore_torch.compiling import compile_layers
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.engine import TorchEngine
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings

from gcore_core.contract.errors import ConfigError
from tests.support import language_models as tiny

pytestmark = pytest.mark.rest


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_layers_give_the_same_logits_and_gradients(
    family: str, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    found = []
    for is_compiled in (False, True):
        model: Any = load_model(str(model_dirs[family]), dtype="float32")
        if is_compiled:
            compile_layers(model, set(model._no_split_modules))
        for rows, width in ((1, 5), (3, 9)):  # rows of any number and length
            ids = torch.arange(rows * width).view(rows, width) % 19
            logits = model(input_ids=ids, use_cache=False).logits
            logits.square().sum().backward()
        found.append((logits.detach(), [p.grad for p in model.parameters()]))
    (logits, gradients), (compiled_logits, compiled_gradients) = found
    np.testing.assert_allclose(compiled_logits, logits, atol=1e-6)
    for gradient, other in zip(gradients, compiled_gradients, strict=True):
        np.testing.assert_allclose(other, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "setting",
    [
        {"context": ContextSettings(ring=2)},
        {"sharding": ShardingSettings(tensor=2)},
        {"offload": OffloadSettings(state=True)},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_was_not_tested_with_it_is_refused_by_name(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"does not go with {name}") as refused:
        TorchTrainerConfig(compile="auto", **setting)
    assert refused.value.where == "compile"


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("several slots", {"ranks": 2}),
        ("a deterministic run", {"deterministic": True}),
        ("a model that takes images", {"takes_images": True}),
        ("a mixture of experts", {"routers": object()}),
    ],
)
def test_a_trainer_refuses_what_only_the_run_tells(
    what: str, facts: dict[str, Any], model_dirs: dict[str, Path]
) -> None:
    context = tiny.make_context(
        model_dirs["llama"], deterministic=facts.get("deterministic", False)
    )
    engine: Any = SimpleNamespace(
        _context=context, ranks=SimpleNamespace(count=facts.get("ranks", 1))
    )
    policy: Any = SimpleNamespace(
        takes_images=facts.get("takes_images", False), routers=facts.get("routers")
    )
    with pytest.raises(ConfigError, match=f"compile does not go with {what}") as refused:
        TorchEngine._compile(engine, policy)
    assert refused.value.todo == "Set it to never."
