"""Kinds D and E: what a log-prob means, and the same weights in another forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gcore_testing.museum import Exhibit, Expected, Scene

from tests.museum.exhibits.weights import AGAIN, GENERATOR, RESPLIT, SENTINEL

ACTION_LOGP = "gcore_language.policy:_action_logp"
CHOOSE = "gcore_torch.generator:choose"
DECODER = "gcore_torch.decoder:FusedDecoder"


def _trainer_temperature(scene: Scene, temperature: float | None) -> None:
    """The trainer divides logits by another temperature; None: by none."""

    def make(action_logp: Callable[..., Any]) -> Callable[..., Any]:
        def planted(logits: Any, targets: Any, given: Any, entropy: Any) -> Any:
            import torch

            if temperature is None and given is None:
                return action_logp(logits, targets, given, entropy)
            scene.act()
            other = None
            if temperature is not None:
                other = torch.full((len(logits),), temperature, device=logits.device)
            return action_logp(logits, targets, other, entropy)

        return planted

    scene.wrap(ACTION_LOGP, make)


def _scaled_logits(scene: Scene) -> None:
    def make(action_logp: Callable[..., Any]) -> Callable[..., Any]:
        def planted(logits: Any, *rest: Any) -> Any:
            scene.act()
            return action_logp(logits * 1.1, *rest)

        return planted

    scene.wrap(ACTION_LOGP, make)


def _choosing(scene: Scene, logp_of: Callable[..., Any]) -> None:
    """Changes the log-probs that the generator records; the tokens stay.

    logp_of: given (logits, tokens, ``top_k``), returns them.
    """

    def make(choose: Callable[..., Any]) -> Callable[..., Any]:
        def planted(logits: Any, uniform: Any, temperature: float, greedy: Any, **how: Any) -> Any:
            tokens, _, margins = choose(logits, uniform, temperature, greedy, **how)
            scene.act()
            return tokens, logp_of(logits.float(), tokens, how.get("top_k", 0)), margins

        return planted

    scene.wrap(CHOOSE, make)


def _raw(logits: Any, tokens: Any, top_k: int) -> Any:
    return logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def _renormalised(logits: Any, tokens: Any, top_k: int) -> Any:
    least = logits.topk(top_k, -1).values[:, -1:]
    kept = logits.masked_fill(logits < least, float("-inf"))
    return kept.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def _recorded(scene: Scene, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Changes the log-probs of finished records in the generator."""

    def make(columns_of: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, indexes: Any) -> Any:
            records = columns_of(self, indexes)
            for columns in records:
                if len(columns["logp"]) > 1:
                    scene.act()
                    columns["logp"] = change(columns["logp"])
            return records

        return planted

    scene.wrap(f"{GENERATOR}._columns", make)


def _last_padded(logp: np.ndarray) -> np.ndarray:
    return np.append(logp[:-1], np.float32(0))


def _running(scene: Scene) -> Callable[[], bool]:
    """Returns whether the run has begun: engines try themselves out before, and so would notice."""
    begun: list[bool] = []

    def make(commit: Callable[..., None]) -> Callable[..., None]:
        def planted(self: Any, plan: Any) -> None:
            commit(self, plan)
            begun.append(True)

        return planted

    scene.wrap(f"{GENERATOR}.commit_weights", make)
    return lambda: bool(begun)


def _decoding(scene: Scene, method: str, change: Callable[[Any], Any]) -> None:
    """Changes what a method of the decoder returns, once the run has begun."""
    running = _running(scene)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, *arguments: Any) -> Any:
            answer = original(self, *arguments)
            if not running():
                return answer
            scene.act()
            return change(answer)

        return planted

    scene.wrap(f"{DECODER}.{method}", make)


def _rounded(tensors: Any) -> Any:
    import torch

    return tuple(tensor.to(torch.bfloat16).to(tensor.dtype) for tensor in tensors)


def _bfloat16_head(scene: Scene) -> None:
    running = _running(scene)

    def make(logits: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, x: Any) -> Any:
            import torch

            if not running():
                return logits(self, x)
            scene.act()
            head = self._model.lm_head.weight.to(torch.bfloat16)
            return (self._norm(x).to(torch.bfloat16) @ head.T).float()

        return planted

    scene.wrap(f"{DECODER}._logits", make)


def _prompts(scene: Scene, change: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """Changes the prompts that the decoder reads; the records keep the right ones.

    change: given a prompt and how many rows share it.
    """
    running = _running(scene)

    def make(prefill: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, prompts: Any, repeats: Any, images: Any = ()) -> Any:
            if running():
                scene.act()
                prompts = [change(p, n) for p, n in zip(prompts, repeats, strict=True)]
            return prefill(self, prompts, repeats, images)

        return planted

    scene.wrap(f"{DECODER}.prefill", make)


def _dropout(scene: Scene) -> None:
    running = _running(scene)

    def make(head_logp: Callable[..., Any]) -> Callable[..., Any]:
        def planted(head: Any, hidden: Any, *rest: Any) -> Any:
            import torch

            if running():
                scene.act()
                hidden = torch.nn.functional.dropout(hidden, 0.1, training=True)
            return head_logp(head, hidden, *rest)

        return planted

    scene.wrap("gcore_language.policy:_head_logp", make)


def _plain_causal_mask(scene: Scene) -> None:
    """Answers that share a row see the answers before them; their positions are right."""
    running = _running(scene)

    def layout(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, samples: "shared" if samples else original(self, samples)

    def make(shared: Callable[..., Any]) -> Callable[..., Any]:
        def planted(rows: Any, device: Any, *rest: Any) -> Any:
            import dataclasses

            import torch

            batch = shared(rows, device, *rest)
            if not running():
                return batch
            scene.act()
            width = batch.ids.shape[1]
            mask = torch.full((width, width), torch.finfo(torch.float32).min).triu(1)
            return dataclasses.replace(batch, mask=mask.expand_as(batch.mask).contiguous())

        return planted

    scene.wrap("gcore_language.training:LanguageTrainer._layout", layout)
    scene.wrap("gcore_language.packing:_shared", make)


def _shifted_positions(scene: Scene) -> None:
    """Positions of the trainer begin at 7, as with pads on the left that nobody counts out."""
    running = _running(scene)

    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Any, module: Any, batch: Any) -> Any:
            import torch

            if not running() or batch.positions is not None:
                return call(self, module, batch)
            scene.act()
            positions = torch.arange(batch.ids.shape[1]).expand_as(batch.ids) + 7
            return module(input_ids=batch.ids, position_ids=positions, use_cache=False)

        return planted

    scene.wrap("gcore_language.policy:Policy._transformers", make)


EXHIBITS = (
    Exhibit(
        id="temperature-forgotten",
        thread="trl#3029",
        kind="D",
        fault="Answers are sampled at temperature 0.6; the trainer's log-probs know nothing of it.",
        shown="nothing",
        plant=lambda scene: _trainer_temperature(scene, None),
        overrides=("roles.rollout.config.temperature=0.6",),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "rollout.0", "trainer", "nothing of the temperature 0.6"),
        ),
    ),
    Exhibit(
        id="temperature-of-the-trainer",
        thread="tinker-cloud#26",
        kind="D",
        fault="The trainer divides its logits by 0.7, the generator by 1.",
        shown="a probe against float32 and a fit of the temperature",
        plant=lambda scene: _trainer_temperature(scene, 0.7),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "0.7 times the trainer's", "another temperature"),
        ),
    ),
    Exhibit(
        id="temperature-nearly-right",
        thread="tinker-cloud#26",
        kind="D",
        fault="The same with 0.99, which is hard to see.",
        shown="not reported at this size",
        plant=lambda scene: _trainer_temperature(scene, 0.99),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "0.99 times the trainer's", "another temperature"),
        ),
    ),
    Exhibit(
        id="raw-log-probs",
        thread="trl#4159",
        kind="D",
        fault="The engine records log-probs of before the temperature.",
        shown="nothing; a user printed the ratio of the first tokens",
        plant=lambda scene: _choosing(scene, _raw),
        overrides=("roles.rollout.config.temperature=0.6",),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "rollout.0", "before the temperature"),
        ),
    ),
    Exhibit(
        id="renormalised-over-top-k",
        thread="trl#6789",
        kind="D",
        fault="The engine's log-probs are of the five likeliest tokens, the trainer's of all.",
        shown="nothing; found by algebra",
        plant=lambda scene: _choosing(scene, _renormalised),
        overrides=("roles.rollout.config.top_k=5",),
        expected=Expected(
            detector=AGAIN, error="WeightMismatch", names=("step 0", "rollout.0", "5 likeliest")
        ),
    ),
    Exhibit(
        id="logits-scaled",
        thread="trl#6629",
        kind="D",
        fault="One of two paths leaves out the model's scale of logits.",
        shown="nothing; the tests' model had no scale",
        plant=_scaled_logits,
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "0.909 times the trainer's", "scale of logits"),
        ),
    ),
    Exhibit(
        id="log-probs-shifted",
        thread="ms-swift#8427",
        kind="D",
        fault="The log-probs of a record are one token off.",
        shown="a ratio metric of about 3",
        plant=lambda scene: _recorded(scene, lambda logp: np.roll(logp, 1)),
        expected=Expected(
            detector=SENTINEL, error="WeightMismatch", names=("step 0", "shifted by one")
        ),
    ),
    Exhibit(
        id="missing-log-prob-is-0",
        thread="vime#70",
        kind="D",
        fault="A log-prob that is missing is filled up with 0, that is probability 1.",
        shown="nothing",
        plant=lambda scene: _recorded(scene, _last_padded),
        expected=Expected(
            detector=SENTINEL,
            error="WeightMismatch",
            names=("step 0", "only the last action", "is 0"),
        ),
    ),
    Exhibit(
        id="rounded-rotary-tables",
        thread="Automodel#2549",
        kind="E",
        fault="A cast of the whole model rounds the tables of the rotary embedding to bfloat16.",
        shown="a reload test against another library",
        plant=lambda scene: _decoding(scene, "_angles", _rounded),
        expected=Expected(
            detector="tables after a push",
            error="WeightMismatch",
            names=("rollout.0", "version 1", "tables of the rotary embedding"),
        ),
    ),
    Exhibit(
        id="bfloat16-head",
        thread="NeMo-RL#3936",
        kind="E",
        fault="The engine computes the output head in bfloat16, the trainer in float32.",
        shown="the usual mismatch metric",
        plant=_bfloat16_head,
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "rollout.0", "output head in bfloat16"),
        ),
    ),
    Exhibit(
        id="shared-prefix-dropped",
        thread="verl#3595",
        kind="E",
        fault="The first token of a prompt is not attended to where several rows share the prompt.",
        shown="a gap of probabilities and bursts of the gradient's norm",
        plant=lambda scene: _prompts(scene, lambda p, n: p[1:] if n > 1 and len(p) > 1 else p),
        expected=Expected(
            detector=AGAIN,
            error="WeightMismatch",
            names=("step 0", "rollout.0", "without their first token"),
        ),
    ),
    Exhibit(
        id="dropout-in-log-probs",
        thread="trl#3500",
        kind="E",
        fault="Dropout is active while log-probs are computed.",
        shown="a KL in the thousands at the first step",
        plant=_dropout,
        expected=Expected(detector=RESPLIT, error="TrainingError", names=("step 0", "dropout")),
    ),
    Exhibit(
        id="packed-without-borders",
        thread="nanoVLM#204",
        kind="E",
        fault="Answers in one row start their positions anew but attend to those before them.",
        shown="nothing; found by changing a prefix",
        plant=_plain_causal_mask,
        expected=Expected(detector=RESPLIT, error="TrainingError", names=("step 0", "neighbours")),
    ),
    Exhibit(
        id="positions-shifted",
        thread="trl#6800",
        kind="E",
        fault="All positions are shifted by the pads on the left; a rotary embedding does not see"
        " it.",
        shown="said to change nothing with a rotary embedding",
        plant=_shifted_positions,
        overrides=("roles.policy.config.packing=padded",),
        expected=Expected(detector="nothing"),
        control=True,
    ),
)
