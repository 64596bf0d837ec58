"""What becomes of TRL's settings, as its configurations had them in 2026.

One table serves ``GRPOConfig``, ``RLOOConfig``, ``SFTConfig`` and ``DPOConfig``, with the names of
``ModelConfig`` and ``ScriptArguments`` beside them. Where one name says something else in another
configuration, the rule asks for the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gcore_migrate.rules import (
    Draft,
    NoCounterpart,
    Rule,
    absent,
    by,
    chosen,
    in_venvs,
    reports,
    run_name,
    to,
)

KINDS = ("grpo", "rloo", "sft", "dpo")
#: The setting by which rules know the kind; it is no setting of TRL.
KIND = "(kind)"

_TRAINS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "linear",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
}
#: TRL's own defaults where ours are others, or where a job must say something.
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {
        **_TRAINS,
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 256,
        "loss_type": "dapo",
        "scale_rewards": "group",
    },
    "rloo": {
        **_TRAINS,
        "learning_rate": 1e-6,
        "num_generations": 2,
        "max_completion_length": 256,
        "beta": 0.05,
    },
    "sft": {**_TRAINS, "learning_rate": 2e-5, "max_length": 1024},
    "dpo": {**_TRAINS, "learning_rate": 1e-6, "beta": 0.1, "max_length": 1024},
}

_TO = "roles.policy.config"  # where settings of the trainer go
_FROM = "roles.rollout.config"  # where settings of the generator go

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_DTYPES = {
    "bfloat16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "float32": "float32",
    "torch.float32": "float32",
    "auto": "float32",
}
_ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attention_2": "flash_attention_2",
}
#: loss_type of GRPO -> objective and its normaliser
_LOSSES = {
    "grpo": ("algorithms/ppo_clip", "sequence"),
    "dr_grpo": ("algorithms/ppo_clip", "constant"),
    "dapo": ("algorithms/ppo_clip", "token"),
    "bnpo": ("algorithms/ppo_clip", "token"),
    "cispo": ("algorithms/cispo", "token"),
    "sapo": ("algorithms/sapo", "sequence"),
}
_DPO_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": None}
_CORRECTIONS = {
    "token_truncate": ("truncate", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "token_mask": ("mask", "token"),
    "sequence_mask": ("mask", "sequence"),
}

_SHOWN = "every step is shown and kept in the run's metrics"
_NO_HUB = "nothing is put on a hub; g-core export writes the weights"


def _kind(draft: Draft) -> str:
    return str(draft.get(KIND))


def _samples(draft: Draft) -> bool:
    return _kind(draft) in ("grpo", "rloo")


def only(kinds: tuple[str, ...], apply: Callable[[Draft, Any], None]) -> Any:
    """Returns a rule's function for some kinds; the others have no counterpart."""

    def checked(draft: Draft, value: Any) -> None:
        if _kind(draft) not in kinds:
            raise NoCounterpart(f"it says nothing of {_kind(draft)}")
        apply(draft, value)

    return checked


def _set(target: str, convert: Callable[[Any], Any]) -> Callable[[Draft, Any], None]:
    def apply(draft: Draft, value: Any) -> None:
        draft.set(target, convert(value))

    return apply


# -- batches ---------------------------------------------------------------------------------------


def _batch(draft: Draft, value: Any) -> None:
    """Sets the prompts of a step and its updates.

    TRL counts records: per_device_train_batch_size x gradient_accumulation_steps make an update, on
    one device. steps_per_generation passes, or generation_batch_size records, are drawn at a time.
    """
    per_pass = int(draft.get("per_device_train_batch_size"))
    per_update = per_pass * int(draft.get("gradient_accumulation_steps"))
    drawn = per_update
    if draft.get("generation_batch_size"):
        drawn = int(draft.get("generation_batch_size"))
    elif draft.get("steps_per_generation"):
        drawn = per_pass * int(draft.get("steps_per_generation"))
    group = int(draft.get("num_generations")) if _samples(draft) else 1
    draft.set("controller.config.prompts", max(1, drawn // group))
    draft.set("controller.config.minibatches", max(1, drawn // per_update))


def _steps(draft: Draft, value: Any) -> None:
    if int(value) <= 0:
        raise NoCounterpart("it leaves the end to num_train_epochs")
    draft.set("run.steps", int(value))


def _epochs(draft: Draft, value: Any) -> None:
    epochs = float(value)  # a part of one, too
    draft.set("run.epochs", int(epochs) if epochs.is_integer() else epochs)
    if int(draft.get("max_steps", -1)) <= 0:
        draft.set("run.steps", 1_000_000)
        draft.todo.append(
            "run.steps is more than run.epochs allows, since the size of the data is not known "
            "here. A schedule of the learning rate counts run.steps: say how many there are."
        )


def _minibatch_passes(draft: Draft, value: Any) -> None:
    draft.set("controller.config.epochs", int(value))


# -- the algorithm ---------------------------------------------------------------------------------


def _scaled(draft: Draft, value: Any) -> None:
    if value in (True, "group"):
        draft.set("advantage.use", "algorithms/grpo")
    elif value in (False, "none"):
        draft.set("advantage.use", "algorithms/dr-grpo")
    else:
        draft.set("advantage.use", "algorithms/reinforce-pp-baseline")


def _loss_type(draft: Draft, value: Any) -> None:
    if _kind(draft) == "dpo":
        name = value[0] if isinstance(value, list) and len(value) == 1 else value
        variant = chosen(_DPO_LOSSES, "loss of pairs")(name)
        if variant is None:
            raise NoCounterpart(f"there is no loss of pairs such as {name}")
        draft.set("objective.config.variant", variant)
        return
    use, normalise = chosen(_LOSSES, "loss")(value)
    if draft.get("importance_sampling_level") == "sequence":
        use = "algorithms/gspo"
    draft.set("objective.use", use)
    draft.set("objective.config.normalise", normalise)
    if normalise == "constant":
        length = int(draft.get("max_completion_length"))
        draft.set("objective.config.constant_length", length)


def _level(draft: Draft, value: Any) -> None:
    _loss_type(draft, draft.get("loss_type"))


def _beta(draft: Draft, value: Any) -> None:
    kind = _kind(draft)
    if kind == "dpo":
        draft.set("objective.config.beta", float(value))
    elif kind == "rloo":
        draft.set("advantage.config.kl.coefficient", float(value))
        draft.set("advantage.config.kl.estimator", "k1")
    elif kind == "grpo":
        draft.set("objective.config.kl.coefficient", float(value))
        draft.set("objective.config.kl.estimator", "k3")
    else:
        raise NoCounterpart("supervised fine-tuning has no KL term")


def _epsilon(draft: Draft, value: Any) -> None:
    if draft.get("loss_type") == "sapo":
        raise NoCounterpart("SAPO does not clip")
    draft.set("objective.config.clip_low", float(value))
    if draft.get("epsilon_high") is None:
        draft.set("objective.config.clip_high", float(value))


def _epsilon_high(draft: Draft, value: Any) -> None:
    if value is None:
        raise NoCounterpart("it is epsilon then")
    high = float(value)
    if draft.get("loss_type") == "cispo":
        high -= 1  # TRL's bounds the ratio itself
    draft.set("objective.config.clip_high", high)


def _correction(draft: Draft, value: Any) -> None:
    kind, level = chosen(_CORRECTIONS, "correction")(value)
    draft.set("objective.config.correction.kind", kind)
    draft.set("objective.config.correction.level", level)
    draft.set("objective.config.old_logprobs", "recompute")


def _mask_truncated(draft: Draft, value: Any) -> None:
    draft.set("controller.config.truncated", "mask" if value else "train")


def _weights(draft: Draft, value: Any) -> None:
    names = _reward_names(draft)
    if not names or len(names) != len(value):
        raise NoCounterpart("it does not say which reward each weight is of")
    for name, weight in zip(names, value, strict=True):
        draft.set(f"rewards.{name}.weight", float(weight))


def _reward_names(draft: Draft) -> list[str]:
    given = draft.get("reward_funcs") or []
    given = given if isinstance(given, list) else [given]
    return [str(name).rpartition(".")[2].rpartition("/")[2].replace("-", "_") for name in given]


def _rewards(draft: Draft, value: Any) -> None:
    for name in _reward_names(draft):
        draft.set(f"rewards.{name}.use", "core/function")
        draft.set(f"rewards.{name}.config", {"path": "rewards.py", "name": name})
    draft.todo.append(
        "rewards: a function here gets one record, with record.text and record.prompt.fields, "
        "TRL's gets lists of completions and columns. Put those that the job names into rewards.py."
    )


def _reward_model(draft: Draft, value: Any) -> None:
    draft.set("rewards.model.use", "torch")
    draft.set("rewards.model.config.path", str(value))


# -- the data --------------------------------------------------------------------------------------

_DATA = {
    "grpo": "data/parquet",
    "rloo": "data/parquet",
    "sft": "offline/chat",
    "dpo": "offline/pairs",
}


def _data(draft: Draft, value: Any) -> None:
    draft.set("data.use", _DATA[_kind(draft)])
    draft.set("data.config.path", f"{str(value).rpartition('/')[2]}")
    draft.todo.append(
        f"data.config.path: {value} is a name on a hub. Save it: "
        f"datasets.load_dataset({str(value)!r}, split='train').save_to_disk(...) for data/parquet, "
        ".to_json(...) for the others."
    )


def _answer(draft: Draft, value: Any) -> None:
    draft.set(f"{_FROM}.max_new_tokens", int(value))


def _prompt(draft: Draft, value: Any) -> None:
    if value is None:
        raise NoCounterpart("prompts are not cut")
    total = int(value) + int(draft.get("max_completion_length"))
    draft.set(f"{_FROM}.context_length", total)


def _longest(draft: Draft, value: Any) -> None:
    if value is None:
        raise NoCounterpart("then there is no limit")
    draft.set(f"{_FROM}.max_tokens", int(value))


# -- the trainer and the generator -----------------------------------------------------------------


def _bf16(draft: Draft, value: Any) -> None:
    draft.set(f"{_TO}.dtype", "bfloat16" if value else "float32")
    if _samples(draft):
        draft.set(f"{_FROM}.dtype", "bfloat16" if value else "float32")


def _dtype(draft: Draft, value: Any) -> None:
    _bf16(draft, chosen(_DTYPES, "dtype")(value) == "bfloat16")


def _beta1(draft: Draft, value: Any) -> None:
    draft.set(f"{_TO}.betas", [float(draft.get("adam_beta1")), float(draft.get("adam_beta2"))])


def _warmup(draft: Draft, value: Any) -> None:
    number = float(value)
    if number < 1 and number != 0:
        raise NoCounterpart("a warm-up is counted in updates")
    draft.set(f"{_TO}.warmup_updates", int(number))


def _min_rate(draft: Draft, value: Any) -> None:
    given = value if isinstance(value, dict) else {}
    if "min_lr_rate" not in given:
        raise NoCounterpart("only min_lr_rate of it says something here")
    draft.set(f"{_TO}.final_fraction", float(given["min_lr_rate"]))


def _vllm(draft: Draft, value: Any) -> None:
    """Takes the engine over, and what ``vllm_enable_sleep_mode`` says, which may stand before."""
    vllm = "vllm/sleeping" if draft.get("vllm_enable_sleep_mode") else "vllm"
    draft.set("roles.rollout.use", vllm if value else "torch")


def _engine(target: str, convert: Callable[[Any], Any]) -> Callable[[Draft, Any], None]:
    def apply(draft: Draft, value: Any) -> None:
        if not draft.get("use_vllm"):
            raise NoCounterpart("use_vllm is off")
        draft.set(target, convert(value))

    return apply


def _vllm_sleeps(draft: Draft, value: Any) -> None:
    _engine("roles.rollout.use", lambda on: "vllm/sleeping" if on else "vllm")(draft, value)


def _peft(draft: Draft, value: Any) -> None:
    draft.set(f"{_TO}.lora.rank", int(draft.get("lora_r", 16)) if value else 0)


def _lora(target: str, convert: Callable[[Any], Any]) -> Callable[[Draft, Any], None]:
    def apply(draft: Draft, value: Any) -> None:
        if not draft.get("use_peft"):
            raise NoCounterpart("use_peft is off")
        draft.set(f"{_TO}.lora.{target}", convert(value))

    return apply


def _targets(value: Any) -> Any:
    return "auto" if value in ("all-linear", ["all-linear"]) else value


def _strategy(target: str) -> Callable[[Draft, Any], None]:
    """Returns a rule for a name such as "steps" or "no"."""

    def apply(draft: Draft, value: Any) -> None:
        if value != "no":
            raise NoCounterpart("how often is said in steps")
        draft.set(target, 0)

    return apply


_GENERATES = ("grpo", "rloo")
_UPDATES = ("controller.config.prompts", "controller.config.minibatches")
_LORA_TARGETS = ("all-linear", "auto")

_ALL: tuple[Rule, ...] = (
    to("model_name_or_path", "roles.policy.model.path", convert=str),
    to("model_revision", "roles.policy.model.revision", convert=str),
    by("dtype", (f"{_TO}.dtype", f"{_FROM}.dtype"), _dtype),
    by("torch_dtype", (f"{_TO}.dtype", f"{_FROM}.dtype"), _dtype),
    by("bf16", (f"{_TO}.dtype", f"{_FROM}.dtype"), _bf16),
    to(
        "attn_implementation", f"{_TO}.attn_implementation", convert=chosen(_ATTENTION, "attention")
    ),
    to("chat_template_kwargs", f"{_FROM}.chat_template_kwargs", convert=dict),
    to("trust_remote_code", f"{_TO}.trust_remote_code", f"{_FROM}.trust_remote_code", convert=bool),
    by("dataset_name", ("data.use", "data.config.path"), _data),
    absent("dataset_config", "a data set is a file"),
    absent("dataset_train_split", "a data set is a file"),
    absent("dataset_test_split", "evaluation.data names a file of its own"),
    absent("dataset_num_proc", "rows are encoded as they are read"),
    by("per_device_train_batch_size", _UPDATES, _batch),
    by("gradient_accumulation_steps", _UPDATES, _batch),
    by("generation_batch_size", _UPDATES, only(_GENERATES, _batch)),
    by("steps_per_generation", _UPDATES, only(_GENERATES, _batch)),
    absent("per_device_eval_batch_size", "passes are filled by tokens, up to budget_tokens"),
    by("num_train_epochs", ("run.epochs", "run.steps"), _epochs),
    by("max_steps", ("run.steps",), _steps),
    by("num_iterations", ("controller.config.epochs",), only(_GENERATES, _minibatch_passes)),
    by(
        "num_generations",
        ("advantage.config.group_size",),
        only(_GENERATES, _set("advantage.config.group_size", int)),
    ),
    by("max_prompt_length", (f"{_FROM}.context_length",), only(_GENERATES, _prompt)),
    by("max_completion_length", (f"{_FROM}.max_new_tokens",), only(_GENERATES, _answer)),
    by("max_length", (f"{_FROM}.max_tokens",), only(("sft", "dpo"), _longest)),
    absent("packing", "records always share passes"),
    absent("padding_free", "records always share passes"),
    by(
        "temperature",
        (f"{_FROM}.temperature",),
        only(_GENERATES, _set(f"{_FROM}.temperature", float)),
    ),
    by("top_p", (f"{_FROM}.top_p",), only(_GENERATES, _set(f"{_FROM}.top_p", float))),
    by(
        "top_k",
        (f"{_FROM}.top_k",),
        only(_GENERATES, _set(f"{_FROM}.top_k", lambda value: max(0, int(value or 0)))),
    ),
    by(
        "beta",
        (
            "objective.config.beta",
            "advantage.config.kl.coefficient",
            "advantage.config.kl.estimator",
            "objective.config.kl.coefficient",
            "objective.config.kl.estimator",
        ),
        _beta,
    ),
    by(
        "label_smoothing",
        ("objective.config.label_smoothing",),
        only(("dpo",), _set("objective.config.label_smoothing", float)),
    ),
    by(
        "epsilon",
        ("objective.config.clip_low", "objective.config.clip_high"),
        only(_GENERATES, _epsilon),
    ),
    by("epsilon_high", ("objective.config.clip_high",), only(_GENERATES, _epsilon_high)),
    absent("delta", "dual_clip bounds the ratio where the advantage is negative, and no other"),
    by(
        "loss_type",
        (
            "objective.use",
            "objective.config.normalise",
            "objective.config.variant",
            "objective.config.constant_length",
        ),
        only(("grpo", "dpo"), _loss_type),
    ),
    by("scale_rewards", ("advantage.use",), only(("grpo",), _scaled)),
    by(
        "importance_sampling_level",
        ("objective.use", "objective.config.normalise", "objective.config.constant_length"),
        only(("grpo",), _level),
    ),
    by(
        "sapo_temperature_pos",
        ("objective.config.temperature_positive",),
        only(("grpo",), _set("objective.config.temperature_positive", float)),
    ),
    by(
        "sapo_temperature_neg",
        ("objective.config.temperature_negative",),
        only(("grpo",), _set("objective.config.temperature_negative", float)),
    ),
    by(
        "entropy_coef",
        ("objective.config.entropy_coefficient",),
        only(_GENERATES, _set("objective.config.entropy_coefficient", float)),
    ),
    by(
        "mask_truncated_completions",
        ("controller.config.truncated",),
        only(_GENERATES, _mask_truncated),
    ),
    by(
        "vllm_importance_sampling_mode",
        (
            "objective.config.correction.kind",
            "objective.config.correction.level",
            "objective.config.old_logprobs",
        ),
        only(("grpo",), _correction),
    ),
    by(
        "vllm_importance_sampling_cap",
        ("objective.config.correction.cap",),
        only(("grpo",), _set("objective.config.correction.cap", float)),
    ),
    by(
        "vllm_importance_sampling_clip_max",
        ("objective.config.correction.cap",),
        only(("grpo",), _set("objective.config.correction.cap", float)),
    ),
    absent("sync_ref_model", "the reference stays what it was"),
    by("reward_funcs", ("rewards",), only(_GENERATES, _rewards)),
    by("reward_weights", ("rewards",), only(_GENERATES, _weights)),
    by(
        "reward_model_name_or_path",
        ("rewards.model.use", "rewards.model.config.path"),
        only(_GENERATES, _reward_model),
    ),
    to("learning_rate", f"{_TO}.learning_rate", convert=float),
    to("lr_scheduler_type", f"{_TO}.schedule", convert=chosen(_SCHEDULES, "schedule")),
    by("lr_scheduler_kwargs", (f"{_TO}.final_fraction",), _min_rate),
    by("warmup_steps", (f"{_TO}.warmup_updates",), _warmup),
    by("warmup_ratio", (f"{_TO}.warmup_updates",), _warmup),
    to("weight_decay", f"{_TO}.weight_decay", convert=float),
    by("adam_beta1", (f"{_TO}.betas",), _beta1),
    by("adam_beta2", (f"{_TO}.betas",), _beta1),
    to("adam_epsilon", f"{_TO}.eps", convert=float),
    to("max_grad_norm", f"{_TO}.clip_grad_norm", convert=float),
    absent("optim", "the optimizer is AdamW"),
    to("gradient_checkpointing", f"{_TO}.gradient_checkpointing", convert=bool),
    absent("gradient_checkpointing_kwargs", "there is one way of it"),
    absent("use_liger_kernel", "no kernels of others are used"),
    by("use_vllm", ("roles.rollout.use",), only(_GENERATES, _vllm)),
    absent("vllm_mode", "engines are processes of the run, on the devices that placement gives"),
    by(
        "vllm_gpu_memory_utilization",
        ("roles.rollout.engine.gpu_memory_utilization",),
        _engine("roles.rollout.engine.gpu_memory_utilization", float),
    ),
    by(
        "vllm_tensor_parallel_size",
        (f"{_FROM}.tensor_parallel",),
        _engine(f"{_FROM}.tensor_parallel", int),
    ),
    by(
        "vllm_max_model_length",
        (f"{_FROM}.context_length",),
        _engine(f"{_FROM}.context_length", int),
    ),
    by("vllm_enable_sleep_mode", ("roles.rollout.use",), _vllm_sleeps),
    by("use_peft", (f"{_TO}.lora.rank",), _peft),
    by("lora_r", (f"{_TO}.lora.rank",), _lora("rank", int)),
    by("lora_alpha", (f"{_TO}.lora.alpha",), _lora("alpha", float)),
    by("lora_dropout", (f"{_TO}.lora.dropout",), _lora("dropout", float)),
    by("lora_target_modules", (f"{_TO}.lora.targets",), _lora("targets", _targets)),
    by("use_rslora", (f"{_TO}.lora.use_rslora",), _lora("use_rslora", bool)),
    by("load_in_4bit", (f"{_TO}.lora.load_in_4bit",), _lora("load_in_4bit", bool)),
    to("seed", "run.seed", convert=int),
    to("run_name", "run.name", convert=run_name),
    to("output_dir", "run.dir", convert=str),
    absent("overwrite_output_dir", "a directory that holds a run is never written over"),
    absent("logging_steps", _SHOWN),
    absent("logging_strategy", _SHOWN),
    absent("logging_first_step", _SHOWN),
    absent("log_completions", "samples of each evaluation are kept and shown"),
    absent("num_completions_to_print", "evaluation.show says how many samples are shown"),
    by("report_to", ("plugins.report", "observers"), reports),
    to("save_steps", "checkpoint.every", convert=int),
    by("save_strategy", ("checkpoint.every",), _strategy("checkpoint.every")),
    to("save_total_limit", "checkpoint.last", convert=int),
    to("eval_steps", "evaluation.every", convert=int),
    by("eval_strategy", ("evaluation.every",), _strategy("evaluation.every")),
    absent("remove_unused_columns", "a row keeps all of its fields"),
    absent("push_to_hub", _NO_HUB),
    absent("hub_model_id", _NO_HUB),
    absent("ddp_find_unused_parameters", "ranks shard the model by FSDP2"),
    absent("dataloader_num_workers", "rows are read as they are asked for"),
)

RULES: dict[str, Rule] = {rule.key: rule for rule in _ALL} | {KIND: absent(KIND, "")}


def finish(draft: Draft) -> None:
    """Adds what TRL does without being told."""
    kind = _kind(draft)
    job = {"grpo": _online, "rloo": _online, "sft": _supervised, "dpo": _paired}[kind]
    job(draft)
    draft.set("roles.policy.use", "torch")
    in_venvs(draft)
    if not draft.has("data.config.path"):
        draft.set("data.use", _DATA[kind])
        draft.set("data.config.path", "train.parquet" if _samples(draft) else "train.jsonl")
        draft.todo.append("data.config.path: the configuration names no data set.")
    if not draft.has("roles.policy.model.path"):
        draft.todo.append("roles.policy.model.path: the configuration names no model.")


def _online(draft: Draft) -> None:
    draft.set("controller.use", "core/sync")
    if _kind(draft) == "rloo":
        draft.set("advantage.use", "algorithms/rloo")
        draft.set("objective.use", "algorithms/ppo_clip")
    if not draft.has("roles.rollout.use"):
        draft.set("roles.rollout.use", "torch")
    if not draft.has("rewards"):
        draft.set("rewards.correct.use", "core/function")
        draft.set("rewards.correct.config", {"path": "rewards.py", "name": "correct"})
        draft.todo.append("rewards.correct: write the reward function into rewards.py.")


def _supervised(draft: Draft) -> None:
    draft.set("controller.use", "offline/sft")
    draft.set("objective.use", "offline/sft")
    draft.set("roles.rollout.use", "offline")


def _paired(draft: Draft) -> None:
    draft.set("controller.use", "offline/pairs")
    draft.set("objective.use", "offline/dpo")
    draft.set("roles.rollout.use", "offline")
