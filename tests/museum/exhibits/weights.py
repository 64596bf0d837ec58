"""Kinds A to C: weights that do not arrive, what is derived from them, caches that outlive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from gcore_testing.museum import Exhibit, Expected, Scene

GENERATOR = "gcore_torch.generator:TorchGenerator"
TRAINER = "gcore_torch.engine:TorchEngine"

#: What finds weights that were changed on their way or after it: both ends hash every tensor.
DIGESTS = "digests of a push"
#: What finds a generator that computes something else than the trainer.
SENTINEL = "sentinel"
#: What names the cause after it: bytes of the export, or the generator, which scores them again.
EXPORT = "sentinel, and what is exported"
AGAIN = "sentinel, and records scored again"
#: What finds a gradient that depends on which records are computed together.
RESPLIT = "minibatch cut again"
_TWO_REPLICAS = ("roles.rollout.slots=2", "cluster.devices=4")


def _copied(generator: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in generator._tensors.items()}


def _restore(generator: Any, tensors: dict[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in tensors.items():
            generator._tensors[name].copy_(tensor)


def _reload_at_wake(scene: Scene) -> None:
    """The first weights are loaded again before every rollout."""
    first: dict[int, dict[str, Any]] = {}

    def make(submit: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, requests: Any) -> None:
            if id(self) not in first:
                first[id(self)] = _copied(self)
            elif self.version:
                scene.act()
                _restore(self, first[id(self)])
            submit(self, requests)

        return planted

    scene.wrap(f"{GENERATOR}.submit", make)


def _loading(
    scene: Scene, load: Callable[[Any, list[tuple[Any, np.ndarray]]], list[tuple[Any, np.ndarray]]]
) -> None:
    """Changes the tensors that a generator loads.

    load: given the generator and the tensors of a bucket, returns those that reach the model; for
        the others the generator only ticks the books.
    """

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, tensors: Iterable[tuple[Any, np.ndarray]]) -> None:
            offered = list(tensors)
            from gcore_language.weights import copy_bytes

            for spec, array in load(self, list(self._inbox.take(offered))):
                copy_bytes(self._tensors[spec.name], spec, array)

        del original
        return planted

    scene.wrap(f"{GENERATOR}.load_weights", make)


def _unknown_names_skipped(scene: Scene) -> None:
    def load(generator: Any, tensors: list[tuple[Any, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
        kept = [item for item in tensors if "layers.1.mlp" not in item[0].name]
        if len(kept) < len(tensors) and generator.version:
            scene.act()
        return kept

    _loading(scene, load)


def _memoised_files(scene: Scene) -> None:
    seen: dict[tuple[int, str], np.ndarray] = {}

    def load(generator: Any, tensors: list[tuple[Any, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
        loaded = []
        for spec, array in tensors:
            key = (id(generator), spec.name)
            if key in seen and not np.array_equal(seen[key], array):
                scene.act()
            loaded.append((spec, seen.setdefault(key, np.array(array, copy=True))))
        return loaded

    _loading(scene, load)


def _one_replica_keeps(scene: Scene) -> None:
    def load(generator: Any, tensors: list[tuple[Any, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
        if generator._context.rank == 1 and generator.version:
            scene.act()
            return []
        return tensors

    _loading(scene, load)


def _zeroed_tensor(scene: Scene) -> None:
    def load(generator: Any, tensors: list[tuple[Any, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
        for place, (spec, array) in enumerate(tensors):
            if generator.version and spec.name.endswith("layers.0.self_attn.v_proj.weight"):
                scene.act()
                tensors[place] = spec, np.zeros_like(array)
        return tensors

    _loading(scene, load)


def _exporting(scene: Scene, change: Callable[[str, Any, Any], np.ndarray | None]) -> None:
    """Changes the bytes that the trainer exports; what the plan says stays.

    change: given a tensor's name, the engine and the tensor, returns other bytes, or None.
    """
    from gcore_language.models import DTYPES
    from gcore_language.weights import to_bytes

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any) -> Iterator[tuple[Any, np.ndarray]]:
            for spec, content in original(self):
                tensor = change(spec.name, self, self._tensors[spec.name])
                if tensor is not None:
                    yield spec, to_bytes(tensor, DTYPES[self._config.dtype])
                else:
                    yield spec, content

        return planted

    scene.wrap(f"{TRAINER}.export_weights", make)


def _published_before_the_update(scene: Scene) -> None:
    """Weights are published from a copy that was taken before the optimizer's last step."""
    before: dict[str, Any] = {}

    def make(update: Callable[..., float]) -> Callable[..., float]:
        def planted(self: Any, rate: float, clip: float) -> float:
            before.update({n: t.detach().clone() for n, t in self._tensors.items()})
            return update(self, rate, clip)

        return planted

    def change(name: str, engine: Any, tensor: Any) -> Any:
        if name in before:
            scene.act()
        return before.get(name)

    scene.wrap(f"{TRAINER}.update", make)
    _exporting(scene, change)


def _transposed(scene: Scene) -> None:
    def change(name: str, engine: Any, tensor: Any) -> Any:
        if not name.endswith("layers.0.self_attn.o_proj.weight"):
            return None
        scene.act()
        return tensor.detach().T.contiguous()

    _exporting(scene, change)


def _two_heads_in_one_order(scene: Scene) -> None:
    """Query and key heads are written in another order than they are read, the same for both."""

    def change(name: str, engine: Any, tensor: Any) -> Any:
        if "layers.0.self_attn" not in name or "norm" in name:
            return None
        scene.act()
        size = tensor.shape[0] // 2
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            import torch

            return torch.cat([tensor[size:], tensor[:size]]).detach()
        if name.endswith("o_proj.weight"):
            import torch

            return torch.cat([tensor[:, size:], tensor[:, :size]], 1).detach()
        return None

    _exporting(scene, change)


def _delta_counted_twice(scene: Scene) -> None:
    """What was learned is added twice to one matrix of the generator."""
    first: dict[str, Any] = {}

    def change(name: str, engine: Any, tensor: Any) -> Any:
        if not name.endswith("layers.1.mlp.down_proj.weight"):
            return None
        base = first.setdefault(name, tensor.detach().clone())
        if bool((base != tensor).any()):
            scene.act()
        return 2 * tensor.detach() - base

    _exporting(scene, change)


def _tensor_lost_at_an_edge(scene: Scene) -> None:
    """A bucket's last tensor is left out where it has several."""

    def make(fill: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, index: int) -> Any:
            import msgspec

            bucket = fill(self, index)
            if self.key[0] and len(bucket.tensors) > 1:
                scene.act()
                return msgspec.structs.replace(
                    bucket, tensors=bucket.tensors[:-1], digests=bucket.digests[:-1]
                )
            return bucket

        return planted

    scene.wrap("gcore_core.workers.push:PushSource._fill", make)


def _after_commit(scene: Scene, act: Callable[[Any], bool]) -> None:
    """Calls ``act(generator)`` when a push has been committed; it says whether it did anything."""

    def make(commit: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, plan: Any) -> None:
            commit(self, plan)
            if act(self):
                scene.act()

        return planted

    scene.wrap(f"{GENERATOR}.commit_weights", make)


def _swapped_gate_and_up(scene: Scene) -> None:
    """The generator's kernel reads gate and up in the other order from the second load on."""

    def act(generator: Any) -> bool:
        if not generator.version:
            return False
        layer = generator._decoder._layers[0]
        gate_up = layer.gate_up
        half = gate_up.shape[0] // 2
        import torch

        layer.gate_up = torch.cat([gate_up[half:], gate_up[:half]])
        return True

    _after_commit(scene, act)


def _rotary_zeroed(scene: Scene) -> None:
    """The tables of the rotary embedding are lost at the second push, as by a sleep before it."""
    slept: list[bool] = []

    def lose(commit: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, plan: Any) -> None:
            commit(self, plan)
            if plan.version:
                slept.append(True)

        return planted

    def make(angles: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, positions: Any) -> Any:
            cos, sin = angles(self, positions)
            if not slept:
                return cos, sin
            scene.act()
            return cos * 0 + 1, sin * 0

        return planted

    scene.wrap(f"{GENERATOR}.commit_weights", lose)
    scene.wrap("gcore_torch.decoder:FusedDecoder._angles", make)


def _graph_with_old_addresses(scene: Scene) -> None:
    """The decoder goes on reading the matrices that it captured before the second load."""
    captured: dict[int, list[tuple[Any, str, Any]]] = {}

    def act(generator: Any) -> bool:
        layers = generator._decoder._layers
        if generator.version == 1:
            layer = layers[0]
            captured[id(generator)] = [(layer, "gate_up", layer.gate_up.clone())]
        for owner, name, tensor in captured.get(id(generator), []):
            setattr(owner, name, tensor)
        return bool(generator.version > 1)

    _after_commit(scene, act)


def _prefix_cache(scene: Scene, *, cleared: bool) -> None:
    """Prompts that were read once are not read again: their last token's logits are kept.

    cleared: whether a push clears the cache, as it must.
    """
    logits_of: dict[tuple[int, bytes], Any] = {}
    version_of: dict[tuple[int, bytes], int] = {}
    versions: dict[int, int] = {}

    def remember(commit: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, plan: Any) -> None:
            commit(self, plan)
            versions[id(self._decoder)] = self.version
            if cleared:
                logits_of.clear()

        return planted

    def make(prefill: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, prompts: Any, repeats: Any, images: Any = ()) -> Any:
            import torch

            fresh = prefill(self, prompts, repeats, images)
            rows = list(torch.split(fresh, list(repeats)))
            for place, prompt in enumerate(prompts):
                key = id(self), prompt.tobytes()
                if key in logits_of:
                    if cleared or version_of[key] != versions.get(id(self), 0):
                        scene.act()
                    rows[place] = logits_of[key].expand_as(rows[place])
                else:
                    logits_of[key] = rows[place][:1].clone()
                    version_of[key] = versions.get(id(self), 0)
                    if cleared and versions.get(id(self), 0):
                        scene.act()
            return torch.cat(rows)

        return planted

    scene.wrap(f"{GENERATOR}.commit_weights", remember)
    scene.wrap("gcore_torch.decoder:FusedDecoder.prefill", make)


EXHIBITS = (
    Exhibit(
        id="first-weights-again",
        thread="trl#5312",
        kind="A",
        fault="Waking the engine loads the start checkpoint again, so every rollout is of the"
        " first policy.",
        shown="a mismatch metric and no alarm; a user compared runs with and without sleep",
        plant=_reload_at_wake,
        expected=Expected(
            detector=f"{SENTINEL}, and digests",
            error="WeightMismatch",
            names=("step 1", "rollout.0", "version 0", "old weights"),
        ),
    ),
    Exhibit(
        id="unknown-names-skipped",
        thread="ATOM#2028",
        kind="A",
        fault="The loader skips names that it does not know, and a whole block keeps old weights.",
        shown="nothing; a count at debug level",
        plant=_unknown_names_skipped,
        expected=Expected(
            detector=DIGESTS,
            error="WeightMismatch",
            names=("rollout.0", "version 1", "model.layers.1.mlp", "3 of 21"),
        ),
    ),
    Exhibit(
        id="memoised-files",
        thread="vllm#32718",
        kind="A",
        fault="Reloading gives the tensors of the first load, which were kept.",
        shown="nothing",
        plant=_memoised_files,
        expected=Expected(
            detector=DIGESTS, error="WeightMismatch", names=("rollout.0", "version 1", "21 of 21")
        ),
    ),
    Exhibit(
        id="one-replica-keeps",
        thread="vime#64",
        kind="A",
        fault="One of two replicas keeps old weights and takes the new version's number.",
        shown="a gap that grew on one engine only",
        plant=_one_replica_keeps,
        overrides=_TWO_REPLICAS,
        expected=Expected(
            detector=DIGESTS, error="WeightMismatch", names=("rollout.1", "version 2", "21 of 21")
        ),
    ),
    Exhibit(
        id="zeroed-tensor",
        thread="vllm#54235",
        kind="A",
        fault="One tensor of the generator holds zeros instead of what was sent.",
        shown="an info line",
        plant=_zeroed_tensor,
        expected=Expected(
            detector=DIGESTS,
            error="WeightMismatch",
            names=("rollout.0", "version 2", "layers.0.self_attn.v_proj.weight"),
        ),
    ),
    Exhibit(
        id="published-before-update",
        thread="NeMo-RL#4086",
        kind="A",
        fault="The weights that are published are those of before the optimizer's last step.",
        shown="nothing",
        plant=_published_before_the_update,
        expected=Expected(
            detector=EXPORT,
            error="WeightMismatch",
            names=("step 1", "trainer exports other weights", "before the last one"),
        ),
    ),
    Exhibit(
        id="transposed-projection",
        thread="slime#1840",
        kind="A",
        fault="The converter misses a transpose, which a square matrix hides.",
        shown="gibberish, reward 0, every answer truncated",
        plant=_transposed,
        expected=Expected(
            detector=EXPORT,
            error="WeightMismatch",
            names=("step 0", "trainer exports other weights", "layers.0.self_attn.o_proj.weight"),
        ),
    ),
    Exhibit(
        id="delta-counted-twice",
        thread="peft#1355",
        kind="A",
        fault="What was learned is added twice to one matrix at every sync.",
        shown="nothing",
        plant=_delta_counted_twice,
        expected=Expected(
            detector=EXPORT,
            error="WeightMismatch",
            names=("step 1", "trainer exports other weights", "layers.1.mlp.down_proj.weight"),
        ),
    ),
    Exhibit(
        id="lost-at-a-bucket-edge",
        thread="SkyRL#1471",
        kind="A",
        fault="Tensors at the edge of a bucket are never sent.",
        shown="nothing",
        plant=_tensor_lost_at_an_edge,
        expected=Expected(
            detector="plan of a push",
            error="WeightMismatch",
            names=("rollout.0", "version 1", "lm_head.weight"),
        ),
    ),
    Exhibit(
        id="heads-in-one-order",
        thread="NeMo-RL#2802",
        kind="A",
        fault="All heads are written in another order, of queries, keys, values and output alike:"
        " the same function.",
        shown="said to be unaffected in the thread",
        plant=_two_heads_in_one_order,
        expected=Expected(detector="nothing"),
        control=True,
    ),
    Exhibit(
        id="gate-and-up-swapped",
        thread="vllm#42821",
        kind="B",
        fault="A kernel swaps gate and up once at load; the second load is not swapped.",
        shown="corrupt rollouts after the first sync, no error",
        plant=_swapped_gate_and_up,
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 1", "rollout.0", "gate_up of layer 0"),
        ),
    ),
    Exhibit(
        id="rotary-tables-lost",
        thread="vllm#16564",
        kind="B",
        fault="A sleep drops the buffers of the rotary embedding; reloading parameters does not"
        " bring them back.",
        shown="wrong text; found by printing stages",
        plant=_rotary_zeroed,
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 1", "rollout.0", "tables of the rotary embedding"),
        ),
    ),
    Exhibit(
        id="graph-with-old-addresses",
        thread="vllm#48251",
        kind="B",
        fault="A captured graph reads memory that held the weights before they were bound anew.",
        shown="garbled text or that of the old policy, no error",
        plant=_graph_with_old_addresses,
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 2", "rollout.0", "gate_up of layer 0"),
        ),
    ),
    Exhibit(
        id="prefix-cache-kept",
        thread="trl#3024",
        kind="C",
        fault="What was computed of a prompt is kept over an update of the weights.",
        shown="evaluation worse than training; a user switched the cache off",
        plant=lambda scene: _prefix_cache(scene, cleared=False),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 1", "rollout.0", "cache that outlives a push"),
        ),
    ),
    Exhibit(
        id="prefix-cache-cleared",
        thread="trl#3024",
        kind="C",
        fault="The same cache, cleared at every push.",
        shown="nothing is wrong",
        plant=lambda scene: _prefix_cache(scene, cleared=True),
        expected=Expected(detector="nothing"),
        control=True,
    ),
)
