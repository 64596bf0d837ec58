"""What needs no Megatron-Core: settings, the shim's rules, log-probs from split logits."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from gcore_megatron import shim
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.logprobs import action_logp, in_chunks

from gcore_core.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel: must be at least 1, is 0"),
        ({"pipeline_parallel": -1}, "pipeline_parallel: must be at least 1, is -1"),
        ({"context_parallel": 0}, "context_parallel: must be at least 1, is 0"),
        (
            {"sequence_parallel": True},
            "sequence_parallel: shares work over .* but tensor_parallel is 1",
        ),
        (
            {"packing": "shared_prompt", "context_parallel": 2},
            "packing: shared_prompt does not go with context_parall",
        ),
        ({"learning_rate": -1.0}, "learning_rate: must not be negative"),
    ],
)
def test_an_invalid_setting_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegatronTrainerConfig(**setting)


def test_a_replica_takes_the_product_of_its_parallel_sizes() -> None:
    plain = {"tensor_parallel": 4, "pipeline_parallel": 3, "context_parallel": 2}
    assert msgspec.convert(plain, MegatronTrainerConfig).replica_slots() == 24
    assert MegatronTrainerConfig().replica_slots() == 1


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("torch.cuda.current_device()", "torch.device('cpu')"),
        ("torch.cuda.synchronize()", "None"),
        ("torch.cuda.empty_cache()", "None"),
        ("torch.cuda.get_rng_state(device=d)", "torch.get_rng_state()"),
        ("torch.cuda.manual_seed(s)", "torch.manual_seed(s)"),
        ("weight.data.cuda(x)", "weight.data.cpu()"),
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("p.type() == 'torch.cuda.FloatTensor'", "p.type() == 'torch.FloatTensor'"),
        ("torch.tensor(x, pin_memory=True)", "torch.tensor(x, pin_memory=False)"),
        ("torch.empty(2, pin_memory=pin, device=d)", "torch.empty(2, pin_memory=pin, device=d)"),
    ],
)
def test_the_shim_rewrites_the_device_of_tensors(source: str, rewritten: str) -> None:
    tree = ast.fix_missing_locations(shim._Rewrite().visit(ast.parse(source)))
    assert ast.unparse(tree) == rewritten


def test_the_shim_refuses_to_be_installed_after_megatron_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, shim._Finder)]
    )
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match=r"megatron\.core was imported before"):
        shim.install()


def test_the_shim_leaves_a_machine_with_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, shim._Finder)]
    )
    before = list(sys.meta_path)
    shim.install()
    assert sys.meta_path == before


def test_importing_the_plugin_imports_no_engine() -> None:
    code = (
        "import sys, gcore_megatron; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_log_probs_and_entropies_match_a_softmax(alone: Any) -> None:
    """Values and gradients, with filled-up rows; float32 rounding."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 16)).requires_grad_()
    targets = torch.tensor([0, 9, 3, 11, 7])
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])
    computed = action_logp(logits, targets, temperature, 12, alone)
    logp = (logits[:, :12] / temperature[:, None]).log_softmax(-1)
    expected = logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    weights = torch.randn(2, 5)
    gradients = []
    for values in (computed, expected):
        gradients += torch.autograd.grad((torch.stack(values) * weights).sum(), logits)
    for one, other in zip((*computed, gradients[0]), (*expected, gradients[1]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_size_of_chunks_does_not_change_results(alone: Any) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 8)
    targets = torch.arange(5)
    hidden = torch.randn(5, 4)
    outcomes = []
    for actions in (5, 2):
        head.zero_grad()
        logp, entropy = in_chunks(
            lambda h, t, _: action_logp(head(h), t, None, 8, alone), hidden, targets, None, actions
        )
        (logp.sum() + entropy.sum()).backward()
        outcomes.append((logp, entropy, head.weight.grad.clone()))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)
