"""What the trainer and the generator say of their memory before they start."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_language.architecture import read_architecture
from gcore_language.lora_settings import LoraSettings
from gcore_language.shared_settings import ValueHeadSettings
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.memory import generator_memory, trainer_memory
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.memory import ASLEEP, MemoryNeed, WorkerShape
from tests.support import sleeping_ranks
from tests.support.known_models import KNOWN
from tests.support.language_models import Clip, make_advantages, make_context, make_records

MODEL = KNOWN[0]  # Qwen2.5-0.5B


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config))
    return str(tmp_path)


def worker(path: str, **words: Any) -> WorkerShape:
    return WorkerShape(role="policy", model={"path": path}, **words)


def of(needs: list[MemoryNeed], what: str, phase: str) -> int | None:
    return next((need.nbytes for need in needs if (need.what, need.phase) == (what, phase)), None)


def test_gradients_are_held_in_training_alone_and_a_reference_only_where_it_is_asked_for(
    path: str,
) -> None:
    plain = list(trainer_memory(TorchTrainerConfig(), worker(path)))
    assert of(plain, "gradients", "training") == 4 * MODEL.parameters
    assert of(plain, "gradients", "rollout") is None
    assert of(plain, "reference", "training") is None
    asked = worker(path, requires=frozenset({"ref_logp"}))
    assert of(list(trainer_memory(TorchTrainerConfig(), asked)), "reference", "training")
    given = worker(path, requires=frozenset({"ref_logp"}), given=frozenset({"ref_logp"}))
    assert of(list(trainer_memory(TorchTrainerConfig(), given)), "reference", "training") is None


def test_what_is_foreseen_of_a_rank_is_what_it_holds_awake_and_asleep(tmp_path: Path) -> None:
    """Of a model of 5 million numbers, in pages of 4 KiB.

    One rank's weights lie in mapped files, whose pages are the system's to keep: those count asleep
    too.
    """
    sleeping_ranks.save_large(tmp_path)
    settings = TorchTrainerConfig(learning_rate=1e-3, resplit_every=0)
    trainer = TorchTrainer(settings, make_context(tmp_path, Clip(beta=0.0)))
    records = make_records(groups=1)
    trainer.prepare(records, frozenset())
    trainer.train(0, make_advantages(records), 1, 1)
    needs = list(trainer_memory(settings, worker(str(tmp_path))))
    foreseen = sum(of(needs, what, "rollout") or 0 for what in ("weights", "optimizer"))
    assert trainer.memory_bytes == pytest.approx(foreseen, rel=0.02)
    trainer.sleep()
    assert of(needs, "state", ASLEEP) == 0
    mapped = of(needs, "weights", "rollout") or 0
    assert trainer.memory_bytes < mapped + 0.02 * foreseen
    trainer.close()


def test_a_deterministic_run_also_holds_exact_sums(path: str) -> None:
    needs = list(trainer_memory(TorchTrainerConfig(), worker(path, deterministic=True)))
    assert of(needs, "exact sums", "training") == 20 * MODEL.parameters


def test_each_replica_holds_the_whole_model(path: str) -> None:
    def held(slots: int, replicas: int) -> int | None:
        config = TorchTrainerConfig(sharding=ShardingSettings(replicas=replicas))
        return of(list(trainer_memory(config, worker(path, slots=slots))), "optimizer", "training")

    assert held(8, 2) == held(4, 1)
    assert held(4, 4) == held(1, 1)


def test_slots_that_split_the_layers_hold_and_compute_parts_of_them(path: str) -> None:
    def needs(slots: int, tensor: int) -> list[MemoryNeed]:
        config = TorchTrainerConfig(sharding=ShardingSettings(tensor=tensor))
        return list(trainer_memory(config, worker(path, slots=slots)))

    split, shared = needs(4, 2), needs(4, 1)
    weights, even = (of(found, "weights", "training") for found in (split, shared))
    assert weights == pytest.approx(even, rel=2e-2)  # vectors are whole in a group
    saved, all_saved = (of(found, "activations", "training") for found in (split, shared))
    assert saved is not None and all_saved is not None and all_saved / 2 < saved < all_saved


def test_slots_that_experts_are_spread_over_share_all_weights_and_gather_their_own_experts(
    tmp_path: Path,
) -> None:
    model = next(model for model in KNOWN if model.name == "Qwen3-235B-A22B")
    (tmp_path / "config.json").write_text(json.dumps(model.config))

    def needs(experts: int) -> list[MemoryNeed]:
        config = TorchTrainerConfig(sharding=ShardingSettings(experts=experts))
        return list(trainer_memory(config, worker(str(tmp_path), slots=64)))

    plain, spread = needs(1), needs(8)
    for found in (plain, spread):
        assert of(found, "weights", "training") == pytest.approx(
            4 * model.parameters / 64, rel=1e-2
        )
    layer = 128 * 3 * 4096 * 1536  # numbers of a layer's experts
    whole, own = (of(found, "gathered weights", "training") or 0 for found in (plain, spread))
    assert whole - own == 4 * layer * 7 // 8
    tokens = TorchTrainerConfig().budget_tokens
    assert of(spread, "tokens under way", "training") == 2 * 4 * tokens * 8 * 4096
    assert of(plain, "tokens under way", "training") is None


def of_place(needs: list[MemoryNeed], place: str) -> int:
    """Returns the bytes of a training step on the device, or on the host."""
    held = [need for need in needs if need.phase == "training" and need.on == place]
    return sum(need.nbytes or 0 for need in held)


def test_what_lies_on_the_host_leaves_the_device_and_is_counted_there(path: str) -> None:
    def needs(**words: bool) -> list[MemoryNeed]:
        offload = OffloadSettings(**words)
        config = TorchTrainerConfig(gradient_checkpointing=True, offload=offload)
        return list(trainer_memory(config, worker(path, device="cuda", slots=2)))

    neither, state, activations = needs(), needs(state=True), needs(activations=True)
    assert of_place(neither, "host") == 0
    held = of_place(state, "host")
    assert held == pytest.approx(8 * MODEL.parameters, rel=1e-3)  # 16 bytes each, on two ranks
    assert of_place(neither, "device") - of_place(state, "device") == held
    inputs = 4 * 896 * 24 * TorchTrainerConfig().budget_tokens
    assert of_place(activations, "host") == inputs
    assert of_place(neither, "device") - of_place(activations, "device") == inputs - inputs // 24


def test_a_state_on_the_host_is_gathered_on_one_rank_too(path: str) -> None:
    config = TorchTrainerConfig(offload=OffloadSettings(state=True))
    needs = list(trainer_memory(config, worker(path, device="cuda")))
    gathered = of(needs, "gathered weights", "training")
    assert gathered is not None and gathered < 4 * MODEL.parameters
    assert of_place(needs, "host") == 16 * MODEL.parameters


@pytest.mark.parametrize(
    ("minibatches", "slots", "tokens"),
    [(1, 1, 4 * 50 + 32 * 40), (2, 1, 740), (3, 1, 740), (2, 2, 420)],
)
def test_a_pass_has_no_more_tokens_than_the_records_of_an_update_on_one_slot(
    path: str, minibatches: int, slots: int, tokens: int
) -> None:
    """Of 4 prompts with 8 answers each, which have their prompt once."""
    facts = {"prompt_tokens": 50, "answer_tokens": 40}
    words = {"records": 32, "group_size": 8, "minibatches": minibatches, "slots": slots}

    def activations(config: TorchTrainerConfig, **more: Any) -> int | None:
        needs = list(trainer_memory(config, worker(path, **words, **more)))
        return of(needs, "activations", "training")

    exact = TorchTrainerConfig(budget_tokens=tokens)
    assert activations(TorchTrainerConfig(), facts=facts) == activations(exact)
    smaller = TorchTrainerConfig(budget_tokens=tokens // 2)
    assert activations(smaller, facts=facts) == activations(smaller)


def test_inputs_of_layers_on_the_host_are_those_of_a_pass_that_the_job_can_have(path: str) -> None:
    config = TorchTrainerConfig(
        gradient_checkpointing=True, offload=OffloadSettings(state=True, activations=True)
    )
    few = {"records": 8, "group_size": 8, "facts": {"prompt_tokens": 50, "answer_tokens": 40}}
    needs = list(trainer_memory(config, worker(path, device="cuda", **few)))
    exact = replace(config, budget_tokens=370)
    assert all((need.nbytes or 0) >= 0 for need in needs)
    assert of(needs, "layers' inputs", "training") == of(
        list(trainer_memory(exact, worker(path, device="cuda"))), "layers' inputs", "training"
    )


def test_adapters_leave_the_base_without_gradients_and_keep_merged_matrices(path: str) -> None:
    needs = list(trainer_memory(TorchTrainerConfig(lora=LoraSettings(rank=8)), worker(path)))
    adapters = of(needs, "adapters", "training") or 0
    assert 0 < adapters < 0.05 * 4 * MODEL.parameters
    assert of(needs, "gradients", "training") == adapters
    assert of(needs, "optimizer", "rollout") == 2 * adapters
    assert of(needs, "weights", "rollout") == 4 * MODEL.parameters
    assert of(needs, "merged weights", "training") == 4 * read_architecture({"path": path}).matrices


def test_a_model_that_gives_values_has_no_output_embedding_and_no_logits(path: str) -> None:
    facts = {"prompt_tokens": 20, "answer_tokens": 9}
    shape = replace(worker(path), records=6, facts=facts)
    config = TorchTrainerConfig()
    values = list(trainer_memory(config, replace(shape, requires=frozenset({"values"}))))
    policy = list(trainer_memory(config, shape))
    assert read_architecture({"path": path}).tied, "else one matrix would be left out"
    assert of(values, "weights", "training") == 4 * MODEL.parameters
    assert of(values, "logits", "preparation") == 0
    assert (of(policy, "logits", "preparation") or 0) > 0


def test_what_was_never_counted_is_unknown_and_not_zero(path: str) -> None:
    config = TorchTrainerConfig(value_head=ValueHeadSettings(coefficient=0.5))
    needs = list(trainer_memory(config, worker(path)))
    assert {need.nbytes for need in needs} == {None}
    assert all(need.note for need in needs)


def test_a_generator_s_cache_is_for_what_is_drawn_and_as_long_as_the_longest_record(
    path: str,
) -> None:
    config = TorchGeneratorConfig(max_new_tokens=48)

    def cache(config: TorchGeneratorConfig, **words: Any) -> int | None:
        return of(
            list(generator_memory(config, worker(path, **words))), "key-value cache", "rollout"
        )

    few = cache(config, records=64, slots=2, facts={"prompt_tokens": 56})
    assert few == cache(TorchGeneratorConfig(max_batch=32, context_length=104))
    many = cache(config, records=64_000, facts={"prompt_tokens": 56})
    assert many == cache(TorchGeneratorConfig(context_length=104))


def test_a_trainer_that_sleeps_keeps_its_state_on_the_host_and_on_a_cpu_nothing(
    path: str,
) -> None:
    def asleep(device: str, **words: Any) -> int | None:
        needs = list(trainer_memory(TorchTrainerConfig(), worker(path, device=device, **words)))
        return of(needs, "state", ASLEEP)

    assert asleep("cpu") == 0
    assert asleep("cuda") == 12 * MODEL.parameters
    assert asleep("cuda", requires=frozenset({"ref_logp"})) == 16 * MODEL.parameters


@pytest.mark.parametrize(("sleep", "kept"), [("keep", 2 * MODEL.parameters), ("discard", 0)])
def test_a_generator_that_sleeps_keeps_on_the_host_what_its_setting_says(
    path: str, sleep: Any, kept: int
) -> None:
    config = TorchGeneratorConfig(dtype="bfloat16", sleep=sleep)
    needs = list(generator_memory(config, worker(path)))
    assert of(needs, "weights", "rollout") == 2 * MODEL.parameters
    (asleep,) = [need for need in needs if need.phase == ASLEEP]
    assert (asleep.on, asleep.nbytes) == ("host", kept)


def test_packed_copies_are_foreseen_where_a_generator_packs_its_weights(path: str) -> None:
    config = TorchGeneratorConfig()
    # biases and norms of 24 layers, and the last norm
    small = 24 * (896 + 2 * 128 + 2 * 896) + 896
    needs = list(generator_memory(config, worker(path, device="cpu")))
    assert of(needs, "packed weights", "training") == 4 * (MODEL.parameters - small)
    # alone the matrices of keys and of values have too few numbers
    apart = generator_memory(replace(config, decoder="transformers"), worker(path, device="cpu"))
    keys = 24 * 2 * 128 * 896
    assert of(list(apart), "packed weights", "training") == 4 * (MODEL.parameters - small - keys)
    for others in (
        generator_memory(config, worker(path, device="cuda")),
        generator_memory(config, worker(path, device="cpu", deterministic=True)),
        generator_memory(replace(config, dtype="bfloat16"), worker(path, device="cpu")),
    ):
        assert of(list(others), "packed weights", "rollout") is None


@pytest.mark.parametrize(("rows", "numbers"), [(2, 0), (32, 30), (1000, 126)])
def test_a_kernel_is_foreseen_for_each_packed_shape_and_number_of_rows(
    rows: int, numbers: int, path: str
) -> None:
    """Five shapes: the head, queries and outputs, keys and values, gates and ups, downs."""
    config = TorchGeneratorConfig(max_batch=rows)
    needs = list(generator_memory(config, worker(path, device="cpu")))
    assert of(needs, "kernels", "rollout") == 5 * numbers * (560 << 10)


def test_small_passes_on_a_cpu_hold_more_than_their_tensors(path: str) -> None:
    """Blocks of less than 4 MiB do not go back to the system: 4,864 channels of 200 tokens do not
    fill one.
    """
    facts = {"prompt_tokens": 20, "answer_tokens": 9}
    shape = replace(worker(path, device="cpu"), records=20, group_size=1, facts=facts)
    needs = list(trainer_memory(TorchTrainerConfig(packing="padded"), shape))
    assert of(needs, "freed blocks", "training") is None  # 580 tokens
    few = list(trainer_memory(TorchTrainerConfig(packing="padded"), replace(shape, records=6)))
    between, held = of(few, "freed blocks", "training"), of(few, "activations", "training")
    assert between is not None and held is not None
    assert between == pytest.approx(0.15 * held, abs=1)
    for other in (
        trainer_memory(TorchTrainerConfig(packing="padded", gradient_checkpointing=True), shape),
        trainer_memory(TorchTrainerConfig(packing="padded"), replace(shape, device="cuda")),
    ):
        assert of(list(other), "freed blocks", "training") is None


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed")
@pytest.mark.parametrize("pushed", ["weights", "adapter"])
def test_a_generator_holds_no_second_model_beside_packed_copies_whatever_is_pushed(
    pushed: str, tmp_path: Path
) -> None:
    """Of 320 MiB that are foreseen. What is drawn, and what libraries take besides, is small."""
    command = [sys.executable, "-m", "tests.support.generator_memory", str(tmp_path), pushed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["held"] > 0.9 * found["foreseen"], "it was not measured"
    assert found["held"] < found["foreseen"] + (96 << 20)


def test_the_cache_has_keys_and_values_of_each_layer_for_each_token_of_each_sample(
    path: str,
) -> None:
    config = TorchGeneratorConfig(
        max_batch=4, context_length=1024, max_new_tokens=256, dtype="bfloat16"
    )
    needs = list(generator_memory(config, worker(path)))
    # 24 layers, 2 key-value heads of 64, keys and values, 2 bytes
    one = 24 * 2 * 64 * 2 * 2 * 4
    assert of(needs, "key-value cache", "rollout") == one * 1024
    # long answers: a cache of 1,024 columns, and the former one while it grows
    long = generator_memory(replace(config, max_new_tokens=1000), worker(path))
    assert of(list(long), "key-value cache", "rollout") == one * (1024 + 848)
    needs = list(
        generator_memory(replace(config, context_length=1025), worker(path, device="cuda"))
    )
    # a cache of 2,048 columns, and that of 1,024 while it grows
    assert of(needs, "key-value cache", "rollout") == one * (2048 + 1024)


def test_rows_between_turns_take_as_much_as_those_that_run_where_there_is_an_environment(
    path: str,
) -> None:
    config = TorchGeneratorConfig(max_batch=8, context_length=4096, max_new_tokens=256)

    def parked(config: TorchGeneratorConfig = config, **words: Any) -> int | None:
        return of(list(generator_memory(config, worker(path, **words))), "parked rows", "rollout")

    # 24 layers, 2 key-value heads of 64, keys and values, 4 bytes, 8 rows
    assert parked(acts=True) == 24 * 2 * 64 * 2 * 4 * 8 * 4096
    assert parked(replace(config, context_length=512), acts=True) == 256 << 20  # they may have that
    assert parked() is None
    assert parked(acts=True, deterministic=True) is None
