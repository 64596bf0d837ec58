"""What needs no Megatron-Core: settings, the shim's rules, log-probs from split logits."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gcore_language.lora_settings import LoraSettings
from gcore_megatron import arguments, shim
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.logprobs import action_logp, in_chunks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_adapters_are_refused_and_a_job_that_says_there_are_none_is_taken() -> None:
    """As the whole job of a run says it that another trainer began."""
    assert not MegatronTrainerConfig(lora=LoraSettings()).lora.on
    with pytest.raises(ConfigError, match=r"lora: .* cannot be trained here"):
        MegatronTrainerConfig(lora=LoraSettings(rank=8))


def test_a_replica_takes_the_product_of_its_parallel_sizes() -> None:
    plain = {"tensor_parallel": 4, "pipeline_parallel": 3, "context_parallel": 2}
    assert msgspec.convert(plain, MegatronTrainerConfig).traits().replica_slots == 24
    assert MegatronTrainerConfig().traits().replica_slots == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor_model_parallel_size", "set by another key; set roles.policy.config.tensor_par"),
        ("deterministic_mode", "this argument is set by another key; set run.deterministic."),
        ("virtual_pipeline_model_parallel_size", "fixed; stages are not interleaved here."),
        (
            "tensor_paralel",
            "no setting 'tensor_paralel' (did you mean 'tensor_parallel'?); its set",
        ),
        ("qwerty", "config: betas, budget_tokens, checkpoint, clip_grad_norm, context_parallel, "),
    ],
)
def test_no_name_under_engine_is_dropped_in_silence(name: str, message: str) -> None:
    """At check all names are told of; a worker that is started all the same refuses the first."""
    (problem,) = arguments.problems({name: 1}, "policy")
    assert problem.startswith(f"roles.policy.engine.{name}: ")
    assert message in problem
    assert len(list(arguments.problems({name: 1, "other": 2}, "policy"))) == 2
    with pytest.raises(ConfigError) as caught:
        arguments.check_engine({name: 1}, "policy")
    assert caught.value.where == f"roles.policy.engine.{name}"
    arguments.check_engine({}, "policy")


def test_every_setting_that_a_refusal_points_to_is_there() -> None:
    known = set(MegatronTrainerConfig.__dataclass_fields__)
    places = [place.removeprefix("config.") for place in arguments.SETTINGS.values()]
    assert set(places) - known == {"run.deterministic", "run.seed", "model.path"}


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
    targets = torch.tensor([0, 9, 3, 11, 7])[:, None]
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])
    computed = action_logp(logits, targets, temperature, 12, alone)
    logp = (logits[:, :12] / temperature[:, None]).log_softmax(-1)
    expected = logp.gather(1, targets), -(logp.exp() * logp).sum(-1)
    weights = torch.randn(5, 2)
    gradients = []
    for own, entropy in (computed, expected):
        values = torch.cat([own, entropy[:, None]], 1)
        gradients += torch.autograd.grad((values * weights).sum(), logits)
    for one, other in zip((*computed, gradients[0]), (*expected, gradients[1]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_size_of_chunks_does_not_change_results(alone: Any) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 8)
    targets = torch.arange(10).remainder(8).view(5, 2)
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


SPLIT_VOCABULARY = 11
SPLIT_ROWS = 6  # of each of two ranks; the last row of the second one is padding


def on_two_ranks(work: Callable[[int, Any], Any]) -> list[Any]:
    """Calls ``work(rank, group)`` in two threads that meet by gloo; returns what they return."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        return work(rank, group)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def test_tokens_of_both_parts_of_a_split_vocabulary_have_the_log_probs_of_the_whole() -> None:
    """Values and gradients against a float64 softmax; 1e-6: float32 rounding.

    Rows name the action's token again, one token twice, and tokens of the other rank alone.
    """
    torch.manual_seed(0)
    whole = torch.randn(4, SPLIT_VOCABULARY, dtype=torch.float64)
    targets = torch.tensor([[0, 0, 5, 6], [10, 7, 8, 9], [3, 4, 4, 5], [5, 6, 10, 0]])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0])
    weights = torch.randn(4, 5)

    def work(rank: int, group: Any) -> tuple[Tensor, Tensor, Tensor]:
        padded = F.pad(whole.float(), (0, 2 * SPLIT_ROWS - SPLIT_VOCABULARY))
        own = padded[:, rank * SPLIT_ROWS :][:, :SPLIT_ROWS].clone().requires_grad_()
        logp, entropy = action_logp(own, targets, temperature, SPLIT_VOCABULARY, group)
        loss = (torch.cat([logp, entropy[:, None]], 1) * weights).sum()
        return logp, entropy, *torch.autograd.grad(loss, own)

    whole.requires_grad_()
    logp = (whole / temperature[:, None]).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    expected = logp.gather(1, targets)
    loss = (torch.cat([expected, entropy[:, None]], 1) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, whole)
    parts = on_two_ranks(work)
    for own_logp, own_entropy, _ in parts:
        torch.testing.assert_close(own_logp.double(), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(own_entropy.double(), entropy, atol=1e-6, rtol=1e-6)
    both = torch.cat([part[2] for part in parts], 1)[:, :SPLIT_VOCABULARY]
    torch.testing.assert_close(both.double(), gradient, atol=1e-6, rtol=1e-6)


class WideTensors(TorchDispatchMode):
    """Counts the numbers of all tensors made that are as wide as the logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dim() == 2 and made.shape[1] == self.width:
            self.numbers += made.numel()
        return made


def test_more_tokens_make_no_further_tensor_as_wide_as_the_vocabulary(alone: Any) -> None:
    width = 97
    counted = []
    for tokens in (1, 9):
        torch.manual_seed(0)
        logits = torch.randn(4, width, requires_grad=True)
        targets = torch.randint(width, (4, tokens))
        with WideTensors(width) as made:
            logp, _ = action_logp(logits, targets, None, width, alone)
            logp.sum().backward()
        counted.append(made.numbers)
    assert counted[0] == counted[1] > 0
