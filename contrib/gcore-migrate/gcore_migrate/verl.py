"""What becomes of verl's keys, as its trainer had them in 2026 (``verl.trainer.main_ppo``)."""

from __future__ import annotations

from collections.abc import Mapping
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
    trackers_of,
)

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"

#: verl's own defaults where ours are others, or where a job must say something.
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.lam": 1.0,
    "data.train_batch_size": 1024,
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.clip_ratio_c": 3.0,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "trainer.total_epochs": 30,
}

_ADVANTAGES = {
    "grpo": "algorithms/grpo",
    "gae": "algorithms/gae",
    "rloo": "algorithms/rloo",
    "rloo_vectorized": "algorithms/rloo",
    "reinforce_plus_plus": "algorithms/reinforce-pp",
    "reinforce_plus_plus_baseline": "algorithms/reinforce-pp-baseline",
}
_OBJECTIVES = {
    "vanilla": "algorithms/ppo_clip",
    "gspo": "algorithms/gspo",
    "cispo": "algorithms/cispo",
    "sapo": "algorithms/sapo",
}
_NORMALISE = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
_TRAINERS = {"fsdp": "torch", "fsdp2": "torch", "megatron": "megatron"}
_GENERATORS = {"vllm": "vllm", "sglang": "sglang", "hf": "torch"}
#: Of these, what splits a replica over devices and has a provider that sleeps.
_ENGINES = ("vllm", "sglang")
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}
_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}

_ALWAYS_DYNAMIC = "passes are always filled by tokens, up to budget_tokens"
_STAYS = "the trainer's weights and optimizer stay on its devices"


# -- the algorithm ---------------------------------------------------------------------------------


def _advantage(draft: Draft, value: Any) -> None:
    use = chosen(_ADVANTAGES, "advantage")(value)
    if value == "grpo" and draft.get("algorithm.norm_adv_by_std_in_grpo") is False:
        use = "algorithms/dr-grpo"
    draft.set("advantage.use", use)
    if value == "reinforce_plus_plus":
        draft.set("advantage.config.normalise_over", "action")
    if value == "gae":
        draft.set("advantage.config.whiten", True)
        draft.set("roles.critic.use", "torch")
        draft.set("plugins.critic", None)
        if not draft.get("critic.model.path"):
            model = draft.get(f"{MODEL}.path")
            draft.set("roles.critic.model.path", model)


def _scaled(draft: Draft, value: Any) -> None:
    if draft.get("algorithm.adv_estimator") != "grpo":
        raise NoCounterpart("it says something of GRPO's advantages alone")
    draft.set("advantage.use", "algorithms/grpo" if value else "algorithms/dr-grpo")


def _is_gae(draft: Draft) -> bool:
    return bool(draft.get("algorithm.adv_estimator") == "gae")


def _gamma(draft: Draft, value: Any) -> None:
    if not _is_gae(draft):
        raise NoCounterpart("advantages of whole answers have no discount")
    draft.set("advantage.config.gamma", float(value))


def _lam(draft: Draft, value: Any) -> None:
    if not _is_gae(draft):
        raise NoCounterpart("advantages of whole answers have no lambda")
    draft.set("advantage.config.lam", float(value))


def _kl_in_reward(draft: Draft, value: Any) -> None:
    coefficient = float(draft.get("algorithm.kl_ctrl.kl_coef", 0.001)) if value else 0.0
    if _is_gae(draft):
        draft.set("advantage.config.kl", coefficient)
        return
    draft.set("advantage.config.kl.coefficient", coefficient)
    if value:
        estimator = chosen(_ESTIMATORS, "KL estimate")(draft.get("algorithm.kl_penalty", "kl"))
        draft.set("advantage.config.kl.estimator", estimator)


def _with_kl_in_reward(draft: Draft, value: Any) -> None:
    _kl_in_reward(draft, bool(draft.get("algorithm.use_kl_in_reward")))


def _kl_loss(draft: Draft, value: Any) -> None:
    coefficient = float(draft.get(f"{ACTOR}.kl_loss_coef", 0.001)) if value else 0.0
    draft.set("objective.config.kl.coefficient", coefficient)
    if value:
        name = str(draft.get(f"{ACTOR}.kl_loss_type", "low_var_kl")).rstrip("+")
        draft.set("objective.config.kl.estimator", chosen(_ESTIMATORS, "KL estimate")(name))


def _with_kl_loss(draft: Draft, value: Any) -> None:
    _kl_loss(draft, bool(draft.get(f"{ACTOR}.use_kl_loss")))


def _clip(draft: Draft, value: Any) -> None:
    """Sets both sides, to what a key of a side's own says where there is one, before or behind."""
    for side in ("low", "high"):
        own = draft.get(f"{ACTOR}.clip_ratio_{side}")
        draft.set(f"objective.config.clip_{side}", float(value if own is None else own))


def _dual_clip(draft: Draft, value: Any) -> None:
    if draft.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla") != "vanilla":
        raise NoCounterpart("only ppo_clip has a dual clip")
    draft.set("objective.config.dual_clip", float(value))


def _aggregation(draft: Draft, value: Any) -> None:
    normalise = chosen(_NORMALISE, "normaliser")(value)
    draft.set("objective.config.normalise", normalise)
    if normalise == "constant":
        length = int(draft.get("data.max_response_length"))
        draft.set("objective.config.constant_length", length)


def _varied(draft: Draft, value: Any) -> None:
    draft.set("filter.use", "core/varied" if value else "core/keep-all")


def _varied_by(draft: Draft, value: Any) -> None:
    if not draft.get("algorithm.filter_groups.enable"):
        raise NoCounterpart("algorithm.filter_groups.enable is off")
    if value != "acc":
        raise NoCounterpart("core/varied looks at the weighted sum of rewards, if not told another")
    draft.set("filter.config.reward", _own_reward(draft))


def _own_reward(draft: Draft) -> str:
    """Returns the name of the reward that says whether an answer is right."""
    return "custom" if draft.get("custom_reward_function.path") else "correct"


# -- the data --------------------------------------------------------------------------------------


def _files(prefix: str) -> Any:
    def apply(draft: Draft, value: Any) -> None:
        files = value if isinstance(value, list) else [value]
        draft.set(f"{prefix}.use", "data/parquet")
        draft.set(f"{prefix}.config.path", str(files[0]))
        if len(files) > 1:
            draft.todo.append(
                f"{prefix}.config.path is the first of {len(files)} files: a data set is one file. "
                "Write them into one."
            )

    return apply


def _prompt_key(draft: Draft, value: Any) -> None:
    for prefix in ("data", "evaluation.data"):
        if draft.get("data.train_files" if prefix == "data" else "data.val_files"):
            draft.set(f"{prefix}.use", "data/parquet")
            draft.set(f"{prefix}.config.messages", str(value))


def _raw_chat(draft: Draft, value: Any) -> None:
    if not value:
        raise NoCounterpart("a chat is always kept as it is")
    _prompt_key(draft, draft.get("data.prompt_key"))


def _context(draft: Draft, value: Any) -> None:
    answer = int(draft.get("data.max_response_length"))
    prompt = int(draft.get("data.max_prompt_length"))
    draft.set("roles.rollout.config.context_length", prompt + answer)


def _answer(draft: Draft, value: Any) -> None:
    draft.set("roles.rollout.config.max_new_tokens", int(value))
    _context(draft, value)


def _too_long(draft: Draft, value: Any) -> None:
    if str(value) != "error":
        raise NoCounterpart("a prompt is never cut")
    overlong = draft.get("data.filter_overlong_prompts")
    draft.set("controller.config.too_long", "drop" if overlong else "error")


def _filter_overlong(draft: Draft, value: Any) -> None:
    draft.set("controller.config.too_long", "drop" if value else "error")


def _mini_batch(draft: Draft, value: Any) -> None:
    prompts = int(draft.get("data.train_batch_size"))
    draft.set("controller.config.minibatches", max(1, prompts // int(value)))


# -- the trainer -----------------------------------------------------------------------------------

_TOKENS = 16384  # of verl's passes that are filled by tokens


def _dynamic(key: str) -> Any:
    """Returns a rule for passes that are filled by tokens, as ours always are.

    key: how many tokens; of the other trainer.
    """

    def apply(draft: Draft, value: Any) -> None:
        if not value:
            raise NoCounterpart(_ALWAYS_DYNAMIC)
        own = draft.get(key) or draft.get(f"{ACTOR}.ppo_max_token_len_per_gpu") or _TOKENS
        _smallest(draft, f"{_TO}.budget_tokens", _number_or_variable(own))

    return apply


def _by_all_records(target: str) -> Any:
    """Returns a rule for a number of records in the passes of all devices together."""

    def apply(draft: Draft, value: Any) -> None:
        devices = int(draft.get("trainer.n_gpus_per_node", 8)) * int(draft.get("trainer.nnodes", 1))
        _smallest(draft, target, max(1, int(value) // devices) * _length(draft))

    return apply


def _ulysses(draft: Draft, value: Any) -> None:
    if draft.get(f"{ACTOR}.strategy") == "megatron":
        raise NoCounterpart("Megatron-Core has context_parallel")
    draft.set(f"{_TO}.context.ulysses", int(value))


def _token_level(draft: Draft, value: Any) -> None:
    draft.set("objective.config.normalise", "token" if value else "sequence")


def _length(draft: Draft) -> int:
    return int(draft.get("data.max_response_length")) + int(draft.get("data.max_prompt_length"))


def _by_records(target: str) -> Any:
    """Returns a rule for a number of records in one pass: their tokens, if all are full."""

    def apply(draft: Draft, value: Any) -> None:
        if value is None:
            raise NoCounterpart(_ALWAYS_DYNAMIC)
        _smallest(draft, target, int(value) * _length(draft))

    return apply


def _by_tokens(target: str) -> Any:
    def apply(draft: Draft, value: Any) -> None:
        _smallest(draft, target, _number_or_variable(value))

    return apply


def _number_or_variable(value: Any) -> int | str:
    """Returns a number, or ``${oc.env:NAME}`` as it is: a job resolves it as verl does."""
    return value if isinstance(value, str) and value.startswith("${") else int(value)


def _smallest(draft: Draft, target: str, tokens: int | str) -> None:
    """Sets a budget of tokens; of several the smallest, since all passes have the same one.

    Where one of them is a variable they cannot be compared, and the first stands.
    """
    node: Any = draft.job
    for name in target.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    if node is None:
        draft.set(target, tokens)
    elif isinstance(node, str) or isinstance(tokens, str):
        draft.set(target, node)
    else:
        draft.set(target, min(int(node), tokens))


def _warmup(draft: Draft, value: Any) -> None:
    if int(value) < 0:
        raise NoCounterpart("it leaves the warm-up to lr_warmup_steps_ratio")
    draft.set("roles.policy.config.warmup_updates", int(value))


def _lora_rank(draft: Draft, value: Any) -> None:
    draft.set("roles.policy.config.lora.rank", int(value))
    if draft.get(f"{ROLLOUT}.name") == "vllm" and int(value):
        draft.set("roles.rollout.config.lora_rank", int(value))


def _lora_targets(draft: Draft, value: Any) -> None:
    draft.set("roles.policy.config.lora.targets", "auto" if value == "all-linear" else value)


def _parallel(target: str) -> Any:
    def apply(draft: Draft, value: Any) -> None:
        if value is None:
            raise NoCounterpart("it is not set")
        if int(value) > 1 or draft.get(f"{ACTOR}.strategy") == "megatron":
            draft.set(target, int(value))
            return
        raise NoCounterpart("1 is what there is without it")

    return apply


def _expert_parallel(draft: Draft, value: Any) -> None:
    """Megatron-Core spreads experts only where tensor-parallel ranks share out tokens, too.

    verl's default is that they do.
    """
    _parallel(f"{_TO}.expert_parallel")(draft, value)
    if int(value) > 1:
        draft.set(f"{_TO}.sequence_parallel", True)


def _offload(draft: Draft, value: Any) -> None:
    """A trainer whose weights leave the device between its phases sleeps, with all that it has."""
    before = draft.job.get("placement", {}).get("sleep_in_rollout")
    draft.set("placement.sleep_in_rollout", "always" if value or before == "always" else "never")


# -- the generator ---------------------------------------------------------------------------------


def _megabytes(value: Any) -> int:
    return int(value) * 2**20


def _template(draft: Draft, value: dict[str, Any]) -> None:
    for name, variable in value.items():
        draft.set(f"{_FROM}.chat_template_kwargs.{name}", variable)


def _memory(draft: Draft, value: Any) -> None:
    name = str(draft.get(f"{ROLLOUT}.name"))
    keys = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
    draft.set(f"roles.rollout.engine.{chosen(keys, 'engine with it')(name)}", float(value))


def _tensor_parallel(draft: Draft, value: Any) -> None:
    if draft.get(f"{ROLLOUT}.name") not in _ENGINES:
        raise NoCounterpart("only the generators on vLLM and SGLang have tensor parallelism")
    draft.set(f"{_FROM}.tensor_parallel", int(value))


def _engine(name: str, convert: Any) -> Any:
    """Returns a rule for a setting that vLLM gets as it is."""

    def apply(draft: Draft, value: Any) -> None:
        if draft.get(f"{ROLLOUT}.name") != "vllm":
            raise NoCounterpart("only vLLM has it")
        draft.set(f"roles.rollout.engine.{name}", convert(value))

    return apply


def _generator(draft: Draft, value: Any) -> None:
    """Takes the engine over, and what ``free_cache_engine`` says of it, which may stand before."""
    name = chosen(_GENERATORS, "generator")(value)
    sleeps = name in _ENGINES and draft.get(f"{ROLLOUT}.free_cache_engine")
    draft.set("roles.rollout.use", f"{name}/sleeping" if sleeps else name)


def _cache_freed(draft: Draft, value: Any) -> None:
    engine = draft.get(f"{ROLLOUT}.name")
    if engine not in _ENGINES:
        raise NoCounterpart("torch's generator drops its cache whenever it sleeps")
    draft.set("roles.rollout.use", f"{engine}/sleeping" if value else engine)


def _engine_words(draft: Draft, value: Any) -> None:
    """Takes ``vllm.<name>`` and ``sglang.<name>`` over for the engine that is chosen."""
    for key, word in value.items():
        engine, _, name = key.partition(".")
        if engine != draft.get(f"{ROLLOUT}.name") or not name:
            raise NoCounterpart("it is for another engine")
        draft.set(f"roles.rollout.engine.{name}", word)


def _chunked(draft: Draft, value: Any) -> None:
    _engine("enable_chunked_prefill", bool)(draft, value)


# -- rewards and the run ---------------------------------------------------------------------------


def _reward_path(draft: Draft, value: Any) -> None:
    if not value:
        raise NoCounterpart("no function is named")
    name = draft.get("custom_reward_function.name", "compute_score")
    draft.set("rewards.custom.use", "core/function")
    draft.set("rewards.custom.config", {"path": str(value), "name": str(name)})
    draft.todo.append(
        "rewards.custom: a function here gets one record, with record.text and "
        "record.prompt.fields, verl's gets data_source, solution_str, ground_truth and extra_info. "
        "Put one in front of it that calls it so."
    )


def _reward_name(draft: Draft, value: Any) -> None:
    _reward_path(draft, draft.get("custom_reward_function.path"))


def _reward_model(draft: Draft, value: Any) -> None:
    if draft.get("reward_model.enable") is False:
        raise NoCounterpart("reward_model.enable is off")
    draft.set("rewards.model.use", "torch")
    draft.set("rewards.model.config.path", str(value))


def _has_reward_model(draft: Draft, value: Any) -> None:
    path = draft.get("reward_model.model.path")
    if not value or not path:
        raise NoCounterpart("no reward model is named")
    _reward_model(draft, path)


def _of_reward_model(apply: Any) -> Any:
    def checked(draft: Draft, value: Any) -> None:
        if not draft.get("reward_model.enable") or not draft.get("reward_model.model.path"):
            raise NoCounterpart("no reward model is named")
        apply(draft, value)

    return checked


def _manager(draft: Draft, value: Any) -> None:
    if value not in ("naive", "dapo") or _own_reward(draft) != "correct":
        raise NoCounterpart("each reward is named under rewards")
    _correct(draft)


def _correct(draft: Draft) -> None:
    draft.set("rewards.correct.use", "core/function")
    draft.set("rewards.correct.config", {"path": "rewards.py", "name": "correct"})
    draft.todo.append(
        "rewards.correct: verl takes a function by the row's data_source. Write yours into "
        "rewards.py, or take one of gcore-rewards."
    )


_OVERLONG = ("rewards.overlong.use", "rewards.overlong.config", "rewards.overlong.weight")


def _overlong(prefix: str, name: str = "overlong_buffer") -> Any:
    """Returns a rule for the penalty of long answers, whose settings lie below ``prefix``."""

    def apply(draft: Draft, value: Any) -> None:
        if not draft.get(f"{prefix}.{name}.enable"):
            raise NoCounterpart("the penalty of long answers is off")
        draft.set("rewards.overlong.use", "algorithms/overlong")
        # verl's reward manager has a length of its own, as a rule that of an answer.
        longest = draft.get(f"{prefix}.max_resp_len") or draft.get("data.max_response_length")
        soft = int(draft.get(f"{prefix}.{name}.len", 0))
        draft.set("rewards.overlong.config", {"max_actions": int(longest), "soft_actions": soft})
        factor = float(draft.get(f"{prefix}.{name}.penalty_factor", 1.0))
        draft.set("rewards.overlong.weight", factor)

    return apply


def _devices(draft: Draft, value: Any) -> None:
    per_node = int(draft.get("trainer.n_gpus_per_node", 8))
    nodes = int(draft.get("trainer.nnodes", 1))
    draft.set("cluster.devices", per_node * nodes)
    for role in ("policy", "rollout"):
        draft.set(f"roles.{role}.slots", per_node * nodes)
    if nodes > 1:
        draft.todo.append(
            f"launcher.use: {nodes} machines need a launcher such as nodes/command or ray; see the "
            "page on several machines."
        )


def _project(draft: Draft, value: Any) -> None:
    trackers = trackers_of(draft.get("trainer.logger"))
    for tracker in trackers:
        draft.set(f"observers.{tracker}.config.project", str(value))
    if draft.get("trainer.default_local_dir"):
        if not trackers:
            raise NoCounterpart("trainer.default_local_dir says where the run is")
        return
    name = draft.get("trainer.experiment_name", "run")
    draft.set("run.dir", f"runs/{value}/{name}")


def _steps(draft: Draft, value: Any) -> None:
    if value is None:
        raise NoCounterpart("it leaves the end to trainer.total_epochs")
    draft.set("run.steps", int(value))


def _epochs(draft: Draft, value: Any) -> None:
    draft.set("run.epochs", int(value))
    if draft.get("trainer.total_training_steps") is None:
        draft.set("run.steps", 1_000_000)
        draft.todo.append(
            "run.steps is more than run.epochs allows, since the size of the data is not known "
            "here. A schedule of the learning rate counts run.steps: say how many there are."
        )


def _warmup_of_critic(draft: Draft, value: Any) -> None:
    if not _is_gae(draft):
        raise NoCounterpart("there is no critic")
    draft.set("roles.critic.head_start", int(value))


def _of_critic(target: str, convert: Any) -> Any:
    def apply(draft: Draft, value: Any) -> None:
        if not _is_gae(draft):
            raise NoCounterpart("there is no critic")
        draft.set(f"roles.critic.{target}", convert(value))

    return apply


def _critic_records(draft: Draft, value: Any) -> None:
    if not _is_gae(draft):
        raise NoCounterpart("there is no critic")
    _by_records("roles.critic.config.budget_tokens")(draft, value)


def _critic_all_records(draft: Draft, value: Any) -> None:
    if not _is_gae(draft):
        raise NoCounterpart("there is no critic")
    _by_all_records("roles.critic.config.budget_tokens")(draft, value)


def _critic_dynamic(draft: Draft, value: Any) -> None:
    if not _is_gae(draft) or not value:
        raise NoCounterpart(_ALWAYS_DYNAMIC if _is_gae(draft) else "there is no critic")
    own = int(draft.get("critic.ppo_max_token_len_per_gpu") or 2 * _TOKENS)
    _smallest(draft, "roles.critic.config.budget_tokens", own)


def _critic_minibatches(draft: Draft, value: Any) -> None:
    if not _is_gae(draft):
        raise NoCounterpart("there is no critic")
    prompts = int(draft.get("data.train_batch_size"))
    draft.set("roles.critic.minibatches", max(1, prompts // int(value)))


def _every(value: Any) -> int:
    return max(0, int(value))


def _packing(value: Any) -> str:
    return "auto" if value else "padded"


def _top_k(value: Any) -> int:
    return max(0, int(value))


_TO = "roles.policy.config"  # where settings of the trainer go
_FROM = "roles.rollout.config"  # where settings of the generator go

_ALL: tuple[Rule, ...] = (
    by(
        "algorithm.adv_estimator",
        (
            "advantage.use",
            "advantage.config.normalise_over",
            "advantage.config.whiten",
            "roles.critic.use",
            "roles.critic.model.path",
            "plugins.critic",
        ),
        _advantage,
    ),
    by("algorithm.norm_adv_by_std_in_grpo", ("advantage.use",), _scaled),
    by("algorithm.gamma", ("advantage.config.gamma",), _gamma),
    by("algorithm.lam", ("advantage.config.lam",), _lam),
    by(
        "algorithm.use_kl_in_reward",
        ("advantage.config.kl", "advantage.config.kl.coefficient", "advantage.config.kl.estimator"),
        _kl_in_reward,
    ),
    by(
        "algorithm.kl_ctrl.kl_coef",
        ("advantage.config.kl", "advantage.config.kl.coefficient", "advantage.config.kl.estimator"),
        _with_kl_in_reward,
    ),
    by(
        "algorithm.kl_penalty",
        ("advantage.config.kl", "advantage.config.kl.coefficient", "advantage.config.kl.estimator"),
        _with_kl_in_reward,
    ),
    by("algorithm.filter_groups.enable", ("filter.use",), _varied),
    by(
        "algorithm.filter_groups.metric",
        (),
        _varied_by,
        "core/varied looks at the sum of rewards, or at the one of filter.config.reward",
    ),
    to(
        "algorithm.filter_groups.max_num_gen_batches",
        "controller.config.max_rounds",
        convert=lambda value: int(value) or 1_000,
    ),
    by("data.train_files", ("data.use", "data.config.path"), _files("data")),
    by(
        "data.val_files",
        ("evaluation.data.use", "evaluation.data.config.path"),
        _files("evaluation.data"),
    ),
    by(
        "data.prompt_key",
        (
            "data.use",
            "data.config.messages",
            "evaluation.data.use",
            "evaluation.data.config.messages",
        ),
        _prompt_key,
    ),
    to("data.image_key", "data.config.images", convert=str),
    to("data.train_batch_size", "controller.config.prompts", convert=int),
    absent("data.gen_batch_size", "a step issues as many groups as it still needs"),
    to("data.val_batch_size", "evaluation.prompts", convert=int),
    by("data.max_prompt_length", (f"{_FROM}.context_length",), _context),
    by("data.max_response_length", (f"{_FROM}.max_new_tokens", f"{_FROM}.context_length"), _answer),
    by("data.filter_overlong_prompts", ("controller.config.too_long",), _filter_overlong),
    by("data.truncation", ("controller.config.too_long",), _too_long),
    absent("data.shuffle", "rows come in an order that run.seed gives"),
    by(
        "data.return_raw_chat",
        (
            "data.use",
            "data.config.messages",
            "evaluation.data.use",
            "evaluation.data.config.messages",
        ),
        _raw_chat,
    ),
    to("data.seed", "run.seed", convert=int),
    to(
        "data.trust_remote_code",
        f"{_TO}.trust_remote_code",
        f"{_FROM}.trust_remote_code",
        convert=bool,
    ),
    # The policy.
    to(f"{MODEL}.path", "roles.policy.model.path", convert=str),
    to(f"{MODEL}.enable_gradient_checkpointing", f"{_TO}.gradient_checkpointing", convert=bool),
    to(f"{MODEL}.use_remove_padding", f"{_TO}.packing", convert=_packing),
    to(
        f"{MODEL}.trust_remote_code",
        f"{_TO}.trust_remote_code",
        f"{_FROM}.trust_remote_code",
        convert=bool,
    ),
    by(f"{MODEL}.lora_rank", (f"{_TO}.lora.rank", f"{_FROM}.lora_rank"), _lora_rank),
    to(f"{MODEL}.lora_alpha", f"{_TO}.lora.alpha", convert=float),
    by(f"{MODEL}.target_modules", (f"{_TO}.lora.targets",), _lora_targets),
    absent(f"{MODEL}.use_shm", "models are read from where they are"),
    absent(f"{MODEL}.use_liger", "no kernels of others are used"),
    absent(f"{MODEL}.use_fused_kernels", "no kernels of others are used"),
    absent(f"{MODEL}.external_lib", "plugins are distributions, listed under plugins"),
    to(f"{ACTOR}.strategy", "roles.policy.use", convert=chosen(_TRAINERS, "trainer")),
    to(f"{ACTOR}.optim.lr", f"{_TO}.learning_rate", convert=float),
    to(f"{ACTOR}.optim.weight_decay", f"{_TO}.weight_decay", convert=float),
    to(f"{ACTOR}.optim.betas", f"{_TO}.betas", convert=list),
    by(f"{ACTOR}.optim.lr_warmup_steps", (f"{_TO}.warmup_updates",), _warmup),
    absent(f"{ACTOR}.optim.lr_warmup_steps_ratio", "a warm-up is counted in updates"),
    to(
        f"{ACTOR}.optim.lr_scheduler_type",
        f"{_TO}.schedule",
        convert=chosen(_SCHEDULES, "schedule"),
    ),
    to(f"{ACTOR}.optim.warmup_style", f"{_TO}.schedule", convert=chosen(_SCHEDULES, "schedule")),
    to(f"{ACTOR}.optim.min_lr_ratio", f"{_TO}.final_fraction", convert=float),
    to(f"{ACTOR}.optim.clip_grad", f"{_TO}.clip_grad_norm", convert=float),
    to(f"{ACTOR}.grad_clip", f"{_TO}.clip_grad_norm", convert=float),
    by(f"{ACTOR}.ppo_mini_batch_size", ("controller.config.minibatches",), _mini_batch),
    to(f"{ACTOR}.ppo_epochs", "controller.config.epochs", convert=int),
    by(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        (f"{_TO}.budget_tokens",),
        _by_records(f"{_TO}.budget_tokens"),
        "as tokens, if every record is full",
    ),
    by(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        (f"{_TO}.budget_tokens",),
        _by_tokens(f"{_TO}.budget_tokens"),
    ),
    by(
        f"{ACTOR}.ppo_micro_batch_size",
        (f"{_TO}.budget_tokens",),
        _by_all_records(f"{_TO}.budget_tokens"),
        "as tokens of one device, if records are full",
    ),
    by(
        f"{ACTOR}.use_dynamic_bsz",
        (f"{_TO}.budget_tokens",),
        _dynamic(f"{ACTOR}.ppo_max_token_len_per_gpu"),
    ),
    by(f"{ACTOR}.ulysses_sequence_parallel_size", (f"{_TO}.context.ulysses",), _ulysses),
    by(f"{ACTOR}.use_token_level_loss", ("objective.config.normalise",), _token_level),
    absent(f"{ACTOR}.fsdp_config.grad_offload", _STAYS),
    by(f"{ACTOR}.clip_ratio", ("objective.config.clip_low", "objective.config.clip_high"), _clip),
    to(f"{ACTOR}.clip_ratio_low", "objective.config.clip_low", convert=float),
    to(f"{ACTOR}.clip_ratio_high", "objective.config.clip_high", convert=float),
    by(f"{ACTOR}.clip_ratio_c", ("objective.config.dual_clip",), _dual_clip),
    by(
        f"{ACTOR}.use_kl_loss",
        ("objective.config.kl.coefficient", "objective.config.kl.estimator"),
        _kl_loss,
    ),
    by(
        f"{ACTOR}.kl_loss_coef",
        ("objective.config.kl.coefficient", "objective.config.kl.estimator"),
        _with_kl_loss,
    ),
    by(
        f"{ACTOR}.kl_loss_type",
        ("objective.config.kl.coefficient", "objective.config.kl.estimator"),
        _with_kl_loss,
    ),
    to(f"{ACTOR}.entropy_coeff", "objective.config.entropy_coefficient", convert=float),
    by(
        f"{ACTOR}.loss_agg_mode",
        ("objective.config.normalise", "objective.config.constant_length"),
        _aggregation,
    ),
    to(f"{ACTOR}.policy_loss.loss_mode", "objective.use", convert=chosen(_OBJECTIVES, "objective")),
    to(f"{MODEL}.torch_dtype", f"{_TO}.dtype", convert=chosen(_DTYPES, "dtype")),
    to(f"{ACTOR}.fsdp_config.model_dtype", f"{_TO}.dtype", convert=chosen(_DTYPES, "dtype")),
    by(f"{ACTOR}.fsdp_config.param_offload", ("placement.sleep_in_rollout",), _offload),
    by(f"{ACTOR}.fsdp_config.optimizer_offload", ("placement.sleep_in_rollout",), _offload),
    absent(f"{ACTOR}.fsdp_config.fsdp_size", "the ranks of a role shard its model together"),
    absent(f"{ACTOR}.fsdp_config.offload_policy", _STAYS),
    by(f"{ACTOR}.megatron.param_offload", ("placement.sleep_in_rollout",), _offload),
    by(f"{ACTOR}.megatron.optimizer_offload", ("placement.sleep_in_rollout",), _offload),
    by(f"{ACTOR}.megatron.grad_offload", ("placement.sleep_in_rollout",), _offload),
    by(
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        (f"{_TO}.tensor_parallel",),
        _parallel(f"{_TO}.tensor_parallel"),
    ),
    by(
        f"{ACTOR}.megatron.pipeline_model_parallel_size",
        (f"{_TO}.pipeline_parallel",),
        _parallel(f"{_TO}.pipeline_parallel"),
    ),
    by(
        f"{ACTOR}.megatron.context_parallel_size",
        (f"{_TO}.context_parallel",),
        _parallel(f"{_TO}.context_parallel"),
    ),
    by(
        f"{ACTOR}.megatron.expert_model_parallel_size",
        (f"{_TO}.expert_parallel", f"{_TO}.sequence_parallel"),
        _expert_parallel,
    ),
    absent(f"{ACTOR}.megatron.expert_tensor_parallel_size", "an expert lies on one slot"),
    absent(f"{ACTOR}.use_torch_compile", "nothing is compiled"),
    absent(f"{ACTOR}.megatron.use_mbridge", "weights are converted by the plugin"),
    absent(f"{ACTOR}.megatron.use_dist_checkpointing", "a run begins with a model's files"),
    absent(f"{REF}.megatron.*", "the reference is sharded as the policy is"),
    absent(f"{REF}.fsdp_config.*", _STAYS),
    absent("reward_model.reward_kwargs.*", "it says nothing of a job"),
    absent(f"{ACTOR}.optim.override_optimizer_config.*", "the optimizer is AdamW, on the device"),
    absent(
        f"{ACTOR}.megatron.override_transformer_config.*",
        "Megatron-Core gets what the plugin's settings say",
    ),
    # The generator.
    by(f"{ROLLOUT}.name", ("roles.rollout.use",), _generator),
    to(f"{ROLLOUT}.n", "advantage.config.group_size", convert=int),
    to(f"{ROLLOUT}.temperature", f"{_FROM}.temperature", convert=float),
    to(f"{ROLLOUT}.top_p", f"{_FROM}.top_p", convert=float),
    to(f"{ROLLOUT}.top_k", f"{_FROM}.top_k", convert=_top_k),
    by(f"{ROLLOUT}.tensor_model_parallel_size", (f"{_FROM}.tensor_parallel",), _tensor_parallel),
    by(
        f"{ROLLOUT}.gpu_memory_utilization",
        ("roles.rollout.engine.gpu_memory_utilization", "roles.rollout.engine.mem_fraction_static"),
        _memory,
    ),
    by(
        f"{ROLLOUT}.enforce_eager",
        ("roles.rollout.engine.enforce_eager",),
        _engine("enforce_eager", bool),
    ),
    by(f"{ROLLOUT}.free_cache_engine", ("roles.rollout.use",), _cache_freed),
    by(
        f"{ROLLOUT}.enable_chunked_prefill",
        ("roles.rollout.engine.enable_chunked_prefill",),
        _chunked,
    ),
    by(
        f"{ROLLOUT}.max_num_batched_tokens",
        ("roles.rollout.engine.max_num_batched_tokens",),
        _engine("max_num_batched_tokens", int),
    ),
    to(f"{ROLLOUT}.max_num_seqs", f"{_FROM}.max_batch", convert=int),
    to(f"{ROLLOUT}.max_model_len", f"{_FROM}.context_length", convert=int),
    to(f"{ROLLOUT}.dtype", f"{_FROM}.dtype", convert=chosen(_DTYPES, "dtype")),
    to(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "controller.config.push_bucket_bytes",
        convert=_megabytes,
    ),
    by("data.apply_chat_template_kwargs.*", (f"{_FROM}.chat_template_kwargs",), _template),
    by(
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        (f"{_TO}.budget_tokens",),
        _by_records(f"{_TO}.budget_tokens"),
        "the trainer's passes have one budget",
    ),
    by(
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        (f"{_TO}.budget_tokens",),
        _by_tokens(f"{_TO}.budget_tokens"),
        "the trainer's passes have one budget",
    ),
    by(
        f"{ROLLOUT}.log_prob_micro_batch_size",
        (f"{_TO}.budget_tokens",),
        _by_all_records(f"{_TO}.budget_tokens"),
        "the trainer's passes have one budget",
    ),
    by(
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        (f"{_TO}.budget_tokens",),
        _dynamic(f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    ),
    by(f"{ROLLOUT}.engine_kwargs.*", ("roles.rollout.engine",), _engine_words),
    absent(f"{ROLLOUT}.multi_turn.*", "a record is one answer to one prompt"),
    absent(f"{ROLLOUT}.agent.*", "a record is one answer to one prompt"),
    absent(f"{MODEL}.override_config.*", "a model is as its configuration says, without dropout"),
    absent(f"{ROLLOUT}.load_format", "an engine begins with the model's files"),
    absent(f"{ROLLOUT}.layered_summon", "a push never holds the whole model"),
    absent(f"{ROLLOUT}.mode", "replicas are always asked without waiting for the others"),
    absent(f"{ROLLOUT}.val_kwargs.do_sample", "an evaluation is greedy and sampled"),
    absent(f"{ROLLOUT}.val_kwargs.n", "an evaluation is greedy and sampled"),
    absent(f"{ROLLOUT}.val_kwargs.temperature", "an evaluation samples as training does"),
    absent(f"{ROLLOUT}.val_kwargs.top_p", "an evaluation samples as training does"),
    absent(f"{ROLLOUT}.val_kwargs.top_k", "an evaluation samples as training does"),
    # The reference.
    by(
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        (f"{_TO}.budget_tokens",),
        _by_records(f"{_TO}.budget_tokens"),
        "the trainer's passes have one budget",
    ),
    by(
        f"{REF}.log_prob_max_token_len_per_gpu",
        (f"{_TO}.budget_tokens",),
        _by_tokens(f"{_TO}.budget_tokens"),
        "the trainer's passes have one budget",
    ),
    by(
        f"{REF}.log_prob_micro_batch_size",
        (f"{_TO}.budget_tokens",),
        _by_all_records(f"{_TO}.budget_tokens"),
        "the trainer's passes have one budget",
    ),
    by(
        f"{REF}.log_prob_use_dynamic_bsz",
        (f"{_TO}.budget_tokens",),
        _dynamic(f"{REF}.log_prob_max_token_len_per_gpu"),
    ),
    by(
        f"{REF}.ulysses_sequence_parallel_size",
        (f"{_TO}.context.ulysses",),
        _ulysses,
        "the reference is sharded as the policy is",
    ),
    by(
        f"{REF}.megatron.tensor_model_parallel_size",
        (f"{_TO}.tensor_parallel",),
        _parallel(f"{_TO}.tensor_parallel"),
        "the reference is sharded as the policy is",
    ),
    by(
        f"{REF}.megatron.pipeline_model_parallel_size",
        (f"{_TO}.pipeline_parallel",),
        _parallel(f"{_TO}.pipeline_parallel"),
        "the reference is sharded as the policy is",
    ),
    by(f"{REF}.fsdp_config.param_offload", ("placement.sleep_in_rollout",), _offload),
    absent(f"{REF}.megatron.param_offload", "the reference waits in host memory anyway"),
    # The critic.
    by("critic.model.path", ("roles.critic.model.path",), _of_critic("model.path", str)),
    by(
        "critic.optim.lr",
        ("roles.critic.config.learning_rate",),
        _of_critic("config.learning_rate", float),
    ),
    by(
        "critic.model.enable_gradient_checkpointing",
        ("roles.critic.config.gradient_checkpointing",),
        _of_critic("config.gradient_checkpointing", bool),
    ),
    by(
        "critic.model.use_remove_padding",
        ("roles.critic.config.packing",),
        _of_critic("config.packing", _packing),
    ),
    by(
        "critic.ppo_micro_batch_size_per_gpu",
        ("roles.critic.config.budget_tokens",),
        _critic_records,
    ),
    by(
        "critic.ppo_max_token_len_per_gpu",
        ("roles.critic.config.budget_tokens",),
        _of_critic("config.budget_tokens", int),
    ),
    by("critic.ppo_mini_batch_size", ("roles.critic.minibatches",), _critic_minibatches),
    by("critic.ppo_epochs", ("roles.critic.epochs",), _of_critic("epochs", int)),
    by(
        "critic.grad_clip",
        ("roles.critic.config.clip_grad_norm",),
        _of_critic("config.clip_grad_norm", float),
    ),
    by(
        "critic.cliprange_value",
        ("roles.critic.objective",),
        _of_critic("objective", lambda value: {"use": "critic", "config": {"clip": float(value)}}),
    ),
    by("critic.model.fsdp_config.param_offload", ("placement.sleep_in_rollout",), _offload),
    by("critic.model.fsdp_config.optimizer_offload", ("placement.sleep_in_rollout",), _offload),
    absent("critic.model.tokenizer_path", "a critic reads the policy's tokens"),
    # Rewards.
    by(
        "reward_model.enable", ("rewards.model.use", "rewards.model.config.path"), _has_reward_model
    ),
    by(
        "reward_model.model.path", ("rewards.model.use", "rewards.model.config.path"), _reward_model
    ),
    by(
        "reward_model.micro_batch_size_per_gpu",
        ("rewards.model.config.budget_tokens",),
        _by_records("rewards.model.config.budget_tokens"),
    ),
    by(
        "reward_model.micro_batch_size",
        ("rewards.model.config.budget_tokens",),
        _of_reward_model(_by_all_records("rewards.model.config.budget_tokens")),
    ),
    by(
        "reward_model.forward_max_token_len_per_gpu",
        ("rewards.model.config.budget_tokens",),
        _of_reward_model(_by_tokens("rewards.model.config.budget_tokens")),
    ),
    absent("reward_model.use_dynamic_bsz", _ALWAYS_DYNAMIC),
    by("reward_model.reward_manager", ("rewards.correct.use", "rewards.correct.config"), _manager),
    by("reward_model.overlong_buffer.enable", _OVERLONG, _overlong("reward_model")),
    by("reward_model.overlong_buffer.len", _OVERLONG, _overlong("reward_model")),
    by("reward_model.overlong_buffer.penalty_factor", _OVERLONG, _overlong("reward_model")),
    by(
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        _OVERLONG,
        _overlong("reward_model.reward_kwargs", "overlong_buffer_cfg"),
    ),
    by(
        "reward_model.reward_kwargs.overlong_buffer_cfg.len",
        _OVERLONG,
        _overlong("reward_model.reward_kwargs", "overlong_buffer_cfg"),
    ),
    by(
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        _OVERLONG,
        _overlong("reward_model.reward_kwargs", "overlong_buffer_cfg"),
    ),
    by(
        "reward_model.reward_kwargs.max_resp_len",
        _OVERLONG,
        _overlong("reward_model.reward_kwargs", "overlong_buffer_cfg"),
    ),
    by(
        "custom_reward_function.overlong_buffer.enable",
        _OVERLONG,
        _overlong("custom_reward_function"),
    ),
    by(
        "custom_reward_function.overlong_buffer.len", _OVERLONG, _overlong("custom_reward_function")
    ),
    by(
        "custom_reward_function.overlong_buffer.penalty_factor",
        _OVERLONG,
        _overlong("custom_reward_function"),
    ),
    absent("reward_model.model.input_tokenizer", "a reward model reads texts"),
    absent("reward_model.model.use_remove_padding", "records are padded there"),
    absent("reward_model.model.fsdp_config.param_offload", _STAYS),
    by(
        "custom_reward_function.path", ("rewards.custom.use", "rewards.custom.config"), _reward_path
    ),
    by(
        "custom_reward_function.name", ("rewards.custom.use", "rewards.custom.config"), _reward_name
    ),
    # The run.
    by("trainer.total_epochs", ("run.epochs", "run.steps"), _epochs),
    by("trainer.total_training_steps", ("run.steps",), _steps),
    to("trainer.experiment_name", "run.name", convert=run_name),
    by(
        "trainer.project_name",
        ("run.dir", "observers"),
        _project,
        "verl's directory is named by both",
    ),
    by("trainer.logger", ("plugins.report", "observers"), reports),
    by(
        "trainer.n_gpus_per_node",
        ("cluster.devices", "roles.policy.slots", "roles.rollout.slots"),
        _devices,
    ),
    by(
        "trainer.nnodes", ("cluster.devices", "roles.policy.slots", "roles.rollout.slots"), _devices
    ),
    to("trainer.save_freq", "checkpoint.every", convert=_every),
    to("trainer.max_actor_ckpt_to_keep", "checkpoint.last", convert=int),
    to("trainer.test_freq", "evaluation.every", convert=_every),
    to("trainer.default_local_dir", "run.dir", convert=str),
    by("trainer.critic_warmup", ("roles.critic.head_start",), _warmup_of_critic),
    absent("trainer.val_before_train", "a run is evaluated before its first step"),
    absent("trainer.log_val_generations", "samples of each evaluation are kept and shown"),
    absent("trainer.resume_mode", "g-core resume RUN goes on with a run"),
    absent("trainer.balance_batch", "records are always balanced over the ranks"),
    absent("trainer.use_legacy_worker_impl", "there is one implementation"),
)

RULES: dict[str, Rule] = {rule.key: rule for rule in _ALL}


def defaults_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns verl's defaults for a configuration; one with Megatron's keys trains on Megatron."""
    is_megatron = any(key.startswith(f"{ACTOR}.megatron.") for key in given)
    return {**DEFAULTS, f"{ACTOR}.strategy": "megatron" if is_megatron else "fsdp"}


def finish(draft: Draft) -> None:
    """Adds what verl does without being told."""
    draft.set("controller.use", "core/sync")
    if not draft.has("roles.rollout.use"):
        draft.set("roles.rollout.use", "vllm")
        draft.todo.append(f"roles.rollout.use: there is no {draft.get(f'{ROLLOUT}.name')} here.")
    in_venvs(draft)
    if not draft.has("objective.use"):
        draft.set("objective.use", "algorithms/ppo_clip")
    if not draft.has("data.config.path"):
        draft.set("data.use", "data/parquet")
        draft.set("data.config.path", "train.parquet")
        draft.todo.append("data.config.path: the configuration names no training file.")
    if not draft.has("roles.policy.model.path"):
        draft.todo.append("roles.policy.model.path: the configuration names no model.")
    if not any(draft.has(f"rewards.{name}") for name in ("correct", "custom", "model")):
        _correct(draft)
