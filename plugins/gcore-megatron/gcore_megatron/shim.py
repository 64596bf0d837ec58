"""Makes Megatron-Core 0.16 run without CUDA by rewriting its sources while they are imported.

Megatron-Core places tensors on "the current CUDA device" by name. Nothing in its arithmetic needs
CUDA. So on a CPU nine rules rewrite where tensors lie. They change ``megatron.core`` alone, and
only in memory: no file changes. Upstream has no CPU device; these rules can go when it has one.

    R1   torch.cuda.current_device()                   the CPU       rotary embedding, gradient buffers
    R2   torch.cuda.synchronize(), .empty_cache()      nothing       pipeline communication, checkpoints
    R3   torch.cuda.get_rng_state(), .manual_seed()    torch's own   random streams
    R4   tensor.cuda()                                 .cpu()        tied embeddings
    R5   device="cuda"                                 "cpu"         optimizers, gradient norms, schedules
    R6   "torch.cuda.FloatTensor" and the like         of the CPU    type checks of optimizers and gradient norms
    R7   the tracker of random streams                 works on torch's CPU generator. Without it ``fork`` does nothing,
                                                       and tensor-parallel ranks diverge without a word
    R10  pin_memory=True                               False         context-parallel rotary embedding
    R12  torch.cuda.Stream(), and the copy on it       nothing       counts of tokens that are sent to experts

Three rules have nothing to do with CUDA. They mend how torch's AdamW is loaded from a checkpoint;
Megatron-Core uses that AdamW when neither Transformer Engine nor Apex is installed. These rules are
applied to the optimizer object:

    R8   a ``DistributedOptimizer`` forgets the ``step`` of each parameter: KeyError
    R9   all its parameters share one ``step`` tensor afterwards, so an update counts once for each of them: silent
    R11  the other optimizers leave a step of 0 out of what they save: KeyError
"""  # noqa: E501

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

_PACKAGE = "megatron.core"
_CPU_TYPES = {
    f"torch.cuda.{name}": f"torch.{name}"
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor")
}
_NOTHING = frozenset({"torch.cuda.synchronize", "torch.cuda.empty_cache", "torch.cuda.Stream"})
_RANDOM = {
    "torch.cuda.get_rng_state": "get_rng_state",
    "torch.cuda.random.get_rng_state": "get_rng_state",
    "torch.cuda.manual_seed": "manual_seed",
}


def install() -> None:
    """Makes ``megatron.core`` importable on this machine; call it before anything imports that.

    It rewrites nothing where torch sees a CUDA device, and a second call does nothing.

    Raises RuntimeError when ``megatron.core`` has been imported already.
    """
    import torch

    # With more than one queue, kernels that overlap communication may run in another order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if any(name == _PACKAGE or name.startswith(_PACKAGE + ".") for name in sys.modules):
        raise RuntimeError(f"{_PACKAGE} was imported before it was made ready for the CPU")
    # Transformer Engine and Apex are for CUDA only, so nothing is missing here
    warnings.filterwarnings("ignore", ".*Apex (is|are) not installed", UserWarning)
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``megatron.core`` where Python would, and gives it a loader that rewrites it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compiles the rewritten source.

        The cache of byte code is left out, so that nothing of the rewritten source reaches the
        disk.
        """
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(self.get_data(path), path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.tensor_parallel.random":
            _track_cpu_generator(module)
        if module.__name__ == "megatron.core.transformer.moe.token_dispatcher":
            _keep_counts(module.MoEAlltoAllTokenDispatcher)


class _Rewrite(ast.NodeTransformer):
    """Applies the rules R1 to R6, R10, and half of R12 to a module's syntax tree."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = _dotted(node.func)
        if name == "torch.cuda.current_device":  # R1
            return ast.copy_location(_call("device", [ast.Constant("cpu")]), node)
        if name in _NOTHING:  # R2
            return ast.copy_location(ast.Constant(None), node)
        if name in _RANDOM:  # R3
            return ast.copy_location(
                _call(_RANDOM[name], node.args if name.endswith("seed") else []), node
            )
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "cuda"
            and name != "torch.cuda"
        ):  # R4
            return ast.copy_location(
                ast.Call(ast.Attribute(node.func.value, "cpu", ast.Load()), [], []), node
            )
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "device" and value == "cuda":  # R5
                keyword.value = ast.copy_location(ast.Constant("cpu"), keyword.value)
            if keyword.arg == "pin_memory" and value is True:  # R10
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and node.value in _CPU_TYPES:  # R6
            return ast.copy_location(ast.Constant(_CPU_TYPES[node.value]), node)
        return node


def _dotted(node: ast.expr) -> str:
    """Returns the text of an expression like ``a.b.c``; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _call(function: str, arguments: list[ast.expr]) -> ast.Call:
    """Makes the expression ``torch.function(arguments)``."""
    return ast.Call(
        ast.Attribute(ast.Name("torch", ast.Load()), function, ast.Load()), arguments, []
    )


def _keep_counts(dispatcher: Any) -> None:
    """Applies the other half of R12: counts of tokens lie in host memory already.

    Upstream copies them from the device on a stream of their own, and waits for it.
    """

    def keep(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                counts = getattr(self, name)
                if hasattr(counts, "numpy"):  # a collective takes an array, and no tensor
                    setattr(self, name, counts.numpy())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = keep


def _track_cpu_generator(module: Any) -> None:
    """Applies R7 to ``megatron.core.tensor_parallel.random``."""
    import torch

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(tracker: Any, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Runs the ``with`` block on the random stream ``name``, as upstream's does.

        Upstream's refuses a CPU generator that has changed. This one does not, because here the CPU
        generator is the one that is tracked.
        """
        if name not in tracker.states_:
            raise KeyError(f"random stream {name} was not added")
        outer = tracker._current_state_name
        outer_state = torch.get_rng_state()
        torch.set_rng_state(tracker.states_[name])
        tracker._current_state_name = name
        try:
            yield
        finally:
            tracker.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state)
            tracker._current_state_name = outer

    module._get_cuda_rng_state = get_state
    module._set_cuda_rng_state = set_state
    module.CudaRNGStatesTracker.fork = fork


def mend_optimizer(optimizer: Any) -> None:
    """Applies R8 and R9, or R11, to an optimizer whose inner one is torch's AdamW.

    R8 and R9 are for a ``DistributedOptimizer``, R11 is for the others.
    """
    if hasattr(optimizer, "_set_main_param_and_optimizer_states"):
        _keep_steps_apart(optimizer)
    else:
        _keep_first_step(optimizer)


def _keep_steps_apart(optimizer: Any) -> None:
    """Applies R8 and R9: keeps each parameter's ``step``, as a tensor of its own."""
    take_parameter = optimizer._set_main_param_and_optimizer_states
    take_all = optimizer.load_state_dict

    def set_states(parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
        take_parameter(
            parameter, {"step": state["step"], **tensors} if "step" in state else tensors
        )

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        take_all(state_dict)
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    optimizer._set_main_param_and_optimizer_states = set_states
    optimizer.load_state_dict = load_state_dict


def _keep_first_step(optimizer: Any) -> None:
    """Applies R11: adds the step of 0 that a saved state lacks."""
    import torch

    take_all = optimizer.load_state_dict

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        inner = state_dict.get("optimizer", state_dict)
        inner["state"].setdefault("common_step", torch.tensor(0.0))
        take_all(state_dict)

    optimizer.load_state_dict = load_state_dict
