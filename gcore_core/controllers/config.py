"""Defines the settings of the step programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gcore_core.contract.memory import PUSH_BYTES
from gcore_core.contract.traits import Traits
from gcore_core.contract.weight_transfer import SHM


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Holds the settings of ``core/sync``, in which a step ends with its training and push.

    prompts: groups that a step trains on, over all shards.
    minibatches, epochs: a step makes minibatches x epochs optimizer updates over the same records.
    tiles: parts into which a deterministic run cuts each minibatch, whatever the number of trainer
        ranks. A rank trains whole tiles, so more ranks than tiles leave some idle. Each tile is a
        pass of its own, so few of them are cheaper where minibatches are small. The last bits of
        the weights depend on it. Other runs do not read it.
    max_rounds: a step issues at most this many times ``prompts`` groups; then it goes on with those
        that teach.
    max_skipped_steps: a step without a group that teaches is skipped: its weights stay as
        they were. The run ends, saved, after this many such steps in a row.
    surplus: groups beyond those that a step needed: "keep" for the next step, under the weights
        that sampled them; "redraw" with newer ones; "auto" keeps them when the objective corrects
        for older weights.
    logprob_band: largest |generator - trainer| log-prob of one action, under the weights that
        sampled it, before the run stops; empty: what the pair states for its dtypes and engines,
        1e-3 where it states nothing.
    too_long: what happens to a prompt longer than the context: its group is left out and counted,
        and another one drawn, or the run stops.
    truncated: what happens to a record that was cut off at its limit of actions: "train" takes it
        for what it is, "mask" trains on none of its actions, though its reward stays in its group's
        baseline. Then a group without any other record is dropped and counted.
    failure_limit: share of a step's groups that may be unusable (failed rewards, failed records)
        before the run stops. Groups that are still drawn count as usable ones.
    push_bucket_bytes: memory that a weight push goes through, on the trainer's machine; a larger
        tensor takes more.
    push_transport: how it goes there: "shm" is shared memory, "ipc" memory of a device, "nccl" a
        broadcast between devices; "auto" is the best that the trainer and all generators speak,
        "shm" where they have no device.
    push_fan_out: to how many other nodes one node sends a push; the nodes beyond get it from
        those. Fewer spare the trainer's network, more make the way to the last node shorter.
    """

    prompts: int = 32
    minibatches: int = 1
    epochs: int = 1
    tiles: int = 4
    max_rounds: int = 10
    max_skipped_steps: int = 10
    surplus: Literal["auto", "keep", "redraw"] = "auto"
    logprob_band: float | None = None
    too_long: Literal["drop", "error"] = "drop"
    truncated: Literal["train", "mask"] = "train"
    failure_limit: float = 0.5
    push_bucket_bytes: int = PUSH_BYTES
    push_transport: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    push_fan_out: int = 2

    GONE_KEYS: ClassVar[dict[str, str]] = {
        "push_delta": "remove it: a push sends whole buckets; where the network is slow, "
        "push_fan_out: 1 sends each from no node twice"
    }

    def traits(self) -> Traits:
        stays_here = self.push_transport not in ("auto", SHM)
        setting = f"controller.config.push_transport={self.push_transport}"
        return Traits(
            groups_per_step=self.prompts,
            minibatches_per_step=self.minibatches,
            updates_per_step=self.minibatches * self.epochs,
            largest_gap=self.logprob_band or 0.0,
            pushes_nearby=setting if stays_here else "",
            push_bytes=self.push_bucket_bytes,
        )

    def __post_init__(self) -> None:
        for name in (
            "prompts",
            "minibatches",
            "epochs",
            "tiles",
            "max_rounds",
            "max_skipped_steps",
            "push_bucket_bytes",
            "push_fan_out",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.logprob_band is not None and not 0 < self.logprob_band < math.inf:
            raise ValueError(
                f"logprob_band must be positive and finite, not {self.logprob_band}: every step "
                "compares the log-probs of generator and trainer"
            )
        if not 0 <= self.failure_limit <= 1:
            raise ValueError(f"failure_limit must be from 0 to 1, not {self.failure_limit}")
