"""What users of this repository's own plugins get wrong: cases of ``test_error_messages.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import DataError

#: A case gets the ``World`` of ``test_error_messages.py``.
Cases = dict[str, Callable[[Any], object]]

WITH_CRITIC = ("plugins=[critic]", "roles.policy.use=torch", "roles.critic.use=torch")
GAE = ("advantage.use=algorithms/gae", "objective.use=algorithms/ppo_clip")
SFT = """\
run: {name: job}
controller: {use: offline/sft}
data: {use: offline/chat, config: {path: rows.jsonl}}
objective: {use: offline/sft}
roles:
  policy: {use: torch, model: {path: org/model}}
  rollout: {use: offline}
"""


def rows(world: Any, use: str, *values: object) -> None:
    """Opens data of ``offline`` with these rows."""
    world.data(f"offline/{use}", "".join(f"{json.dumps(value)}\n" for value in values))


def differing_vocabulary(world: Any) -> None:
    """A teacher whose tokenizer has another token than the policy's at one id."""
    from gcore_algorithms.teacher.checks import refusal

    differs = "the same id 285 is 'is' in one and 'Is' in the other"
    raise DataError(refusal("teacher", differs), where="roles.teacher.model: org/teacher")


def differing_weights(world: Any, **differences: Any) -> None:
    """A model whose files are compared with its architecture."""
    from gcore_language.pretrained import Differences

    Differences(**differences).refuse(Path("models/base"))


def nan_in_weights(world: Any) -> None:
    import torch
    from gcore_language.pretrained import refuse_not_finite

    weight = torch.tensor([1.0, 2.0, torch.nan])
    refuse_not_finite([("model.norm.weight", weight)], Path("models/base"))


def open_model(world: Any, config: dict[str, Any], **files: str) -> None:
    """Looks at a model directory with these files, whose names lack their endings."""
    from gcore_language.model_files import read_model_files

    directory = world.directory / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        ending = "json" if content.startswith("{") else "safetensors"
        (directory / f"{name}.{ending}").write_text(content)
    read_model_files(directory)


def quantised(world: Any) -> None:
    from gcore_language.model_files import refuse_quantised

    refuse_quantised(Path("models/base"), {"quantization_config": {"quant_method": "awq"}}, {})


def no_host_of_two(world: Any) -> None:
    """Both hosts refuse the connection."""
    from gcore_nodes.commands import check_usable

    ssh = "the command ended with 255: ssh: connect to host node2 port 22: Connection refused"
    check_usable("ssh {host}", ["node1", "node2"], "python", [ssh, ssh])


def counted(world: Any, *overrides: str) -> None:
    """Counts a job's memory, as ``g-core check`` does."""
    from gcore_tools.plan.memory_needs import memory_needs

    from gcore_core.run.initial_placement import find_nodes, place

    plan = world.load(*overrides)
    memory_needs(plan, place(plan, find_nodes(plan)), {})


def judged(world: Any, *lines: dict[str, Any]) -> Path:
    file: Path = world.directory / "judgements.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def misspelt_process(world: Any) -> None:
    (world.directory / "logs").mkdir()
    for name in ("supervisor", "policy.0", "rollout.0"):
        (world.directory / "logs" / f"{name}.log").touch()
    world.command("logs", str(world.directory), "polcy.0")


def old_run(world: Any) -> Path:
    """Makes a run whose metrics have no digests."""
    row = '{"step": 1, "version": 1, "time_unix_s": 0, "metrics": {}}'
    for name, text in {"config.yaml": "run: {}", "metrics.jsonl": row}.items():
        (world.directory / name).write_text(f"{text}\n")
    return world.directory


def begun(world: Any) -> Path:
    """A run whose first step is not over."""
    directory: Path = world.directory / "run"
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text("run: {steps: 3}\n")
    return directory


CASES: dict[str, Cases] = {
    "Critic": {
        "plugin that is not named": lambda w: w.load("roles.critic.use=torch"),
        "gae without a critic": lambda w: w.load(
            *GAE, "plugins=[critic]", "roles.policy.use=torch"
        ),
        "critic that nothing reads": lambda w: w.load(*WITH_CRITIC),
        "critic of a trainer without a value head": lambda w: w.load(
            *GAE, *WITH_CRITIC, "roles.critic.use=fake"
        ),
        "clip that is no distance": lambda w: w.load(
            *GAE, *WITH_CRITIC, "roles.critic.objective={use: critic, config: {clip: -1}}"
        ),
        "head start for an advantage of records": lambda w: w.load(
            *WITH_CRITIC, "objective.use=critic", "roles.critic.head_start=5"
        ),
        "adapters of a critic": lambda w: counted(
            w, *GAE, *WITH_CRITIC, "roles.critic.config.lora.rank=8"
        ),
        "settings of a critic on the policy": lambda w: w.load(
            *GAE, *WITH_CRITIC, "roles.policy.minibatches=4"
        ),
    },
    "Trackers": {
        "tracker that does not exist": lambda w: w.load("observers.one.use=trackers/wanb"),
        "password in an address": lambda w: w.load(
            "observers.one={use: trackers/mlflow, config: {tracking_uri: 'https://a:b@host'}}"
        ),
    },
    "Teacher": {
        "distillation without a teacher": lambda w: w.load(
            "objective.use=teacher/reverse-kl", "roles.policy.use=torch"
        ),
        "likeliest tokens that are not given": lambda w: w.load(
            "objective.use=teacher/jsd", "roles.policy.use=torch", "roles.teacher.use=teacher"
        ),
        "fewer than no likeliest tokens": lambda w: w.load(
            "roles.teacher.use=teacher", "roles.teacher.config.top_k=-1"
        ),
        "nothing to learn from": lambda w: w.load("advantage.use=teacher/no-reward"),
        "another tokenizer": differing_vocabulary,
    },
    "Training without generation": {
        "row of no format": lambda w: rows(w, "chat", {"prompt": "2+2=", "label": "4"}),
        "pair with one answer": lambda w: rows(w, "pairs", {"prompt": "2+2=", "chosen": "4"}),
        "pair of equal answers": lambda w: rows(w, "pairs", {"chosen": "4", "rejected": "4"}),
        "score that is no number": lambda w: rows(
            w, "scores", {"prompt": "2+2=", "completion": "4", "score": "good"}
        ),
        "no row": lambda w: w.data("offline/chat", "\n"),
        "generator in place of a reader": lambda w: w.load("roles.rollout.use=fake", text=SFT),
        "rows for another program": lambda w: w.load("controller.use=offline/pairs", text=SFT),
        "reward that nobody asks for": lambda w: w.load("rewards.letters.use=fake", text=SFT),
    },
    "Models": {
        "half of the layers": lambda w: differing_weights(
            w, missing=[f"model.layers.2.mlp.{name}_proj.weight" for name in ("down", "gate")]
        ),
        "names that peft gave": lambda w: differing_weights(
            w, missing=["model.norm.weight"], unused=["base_model.model.model.norm.weight"]
        ),
        "names with a beginning": lambda w: differing_weights(
            w, missing=["model.norm.weight"], unused=["module.model.norm.weight"]
        ),
        "no output embedding": lambda w: differing_weights(w, missing=["lm_head.weight"]),
        "more words than rows": lambda w: differing_weights(
            w, reshaped=[("model.embed_tokens.weight", (32000, 64), (32001, 64))]
        ),
        "head that no layer takes": lambda w: differing_weights(
            w, unused=["v_head.summary.weight"]
        ),
        "weight that is NaN": nan_in_weights,
        "quantised weights": quantised,
        "adapter in place of a model": lambda w: open_model(w, {}, adapter_config="{}"),
        "pointer of git LFS": lambda w: open_model(
            w, {}, model="version https://git-lfs.github.com/spec/v1"
        ),
    },
    "Human feedback": {
        "no such command": lambda w: w.command("human", "rat"),
        "nothing to rate": lambda w: w.command("human", "rate"),
        "two things to rate": lambda w: w.command(
            "human", "rate", "--file", "answers.jsonl", "--steps", "3"
        ),
        "run that asks nobody": lambda w: w.command("human", "label", str(w.directory)),
        "no preference to write": lambda w: w.command(
            "human", "pairs", str(judged(w)), "--to", "pairs.jsonl"
        ),
        "scale upside down": lambda w: w.load(
            "rewards.letters.use=human",
            "rewards.letters.config={path: asked, lowest: 5, highest: 1}",
        ),
    },
    "Compare and print runs": {
        "no run to compare": lambda w: w.command(
            "diff", str(w.directory / "runs" / "x"), str(w.directory)
        ),
        "no run in a directory to compare": lambda w: w.command(
            "diff", str(w.directory), str(w.directory)
        ),
        "a run that cannot be compared": lambda w: w.command(
            "diff", str(old_run(w)), str(w.directory)
        ),
        "no logs": lambda w: w.command("logs", str(w.directory)),
        "misspelt process": lambda w: misspelt_process(w),
    },
    "Page of a run": {
        "directory without a run": lambda w: w.command("report", str(w.directory)),
        "page that cannot be written": lambda w: w.command(
            "report", str(begun(w)), "--to", str(w.directory / "gone" / "page.html")
        ),
        "number that is no port": lambda w: w.command("watch", str(begun(w)), "--port", "65536"),
    },
    "Engines of trainers": {
        "argument of Megatron-Core": lambda w: w.load(
            "roles.policy.use=megatron", "roles.policy.engine={tensor_model_parallel_size: 2}"
        ),
        "argument that Megatron-Core is not given": lambda w: w.load(
            "roles.policy.use=megatron", "roles.policy.engine={tensor_paralel: 2, fp8: hybrid}"
        ),
        "misspelt setting of DeepSpeed": lambda w: w.load(
            "roles.policy.use=deepspeed", "roles.policy.engine={tensorboard: {enable: true}}"
        ),
        "engine of a trainer without one": lambda w: w.load(
            "roles.policy.use=torch", "roles.policy.engine={compile: true}"
        ),
    },
    "Machines": {
        "command without a host": lambda w: w.load(
            "launcher={use: nodes/command, config: {hosts: [node1, node2], command: ssh}}"
        ),
        "hosts that cannot be used": no_host_of_two,
        "port that only the system may open": lambda w: w.load(
            "launcher={use: nodes/join, config: {hosts: 2, join_port: 80}}"
        ),
        "name that Kubernetes does not take": lambda w: w.command(
            *("nodes", "jobset", "job.yaml", "--name", "My_Job"),
            *("--image", "trainer", "--nodes", "2", "--claim", "disk"),
        ),
        "Ray client's address": lambda w: w.load(
            "launcher={use: ray, config: {cluster: 'ray://head:10001'}}"
        ),
        "Ray cluster's address as a network": lambda w: w.load(
            "launcher={use: ray, config: {address: 'head:6379'}}"
        ),
        "resources of nothing": lambda w: w.load(
            "launcher={use: ray, config: {resources: {GPU: 0}}}"
        ),
    },
}
