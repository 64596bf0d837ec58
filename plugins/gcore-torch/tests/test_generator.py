from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.models import load_model
from gcore_torch.cache_columns import most_columns_on_cpu
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.decoder import FusedDecoder, TransformersDecoder
from gcore_torch.generator import TorchGenerator
from gcore_torch.products import Products
from gcore_torch.sampling import choose, uniforms
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcore_core.contract.errors import ConfigError, WeightMismatch
from gcore_core.contract.generator import (
    Fingerprints,
    Finished,
    Generator,
    ReceivesWeights,
    SampleRequest,
    ScoresLogprobs,
)
from gcore_core.contract.records import Prompt, WeightPlan
from tests.support import language_models as tiny

FAMILIES = ["llama", "qwen2", "qwen3", "gpt2"]


@pytest.fixture
def open_generator(model_dirs: dict[str, Path]) -> Any:
    def make(family: str = "llama", deterministic: bool = False, **config: Any) -> TorchGenerator:
        settings = TorchGeneratorConfig(**({"max_new_tokens": 12} | config))
        return TorchGenerator(
            settings, tiny.make_context(model_dirs[family], deterministic=deterministic)
        )

    return make


def reference_logp(directory: Path, record: Finished) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logp, _ = tiny.logp_of(model, record)
    return logp


def test_the_generator_implements_the_protocols_it_claims(open_generator: Any) -> None:
    generator = open_generator()
    for protocol in (Generator, ReceivesWeights, Fingerprints, ScoresLogprobs):
        assert isinstance(generator, protocol)


@pytest.mark.parametrize("family", FAMILIES)
def test_logp_matches_the_forward_pass_of_the_model(
    family: str, open_generator: Any, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(family, temperature=0.8)
    kind = TransformersDecoder if family == "gpt2" else FusedDecoder
    assert type(generator._decoder) is kind
    generator.submit(tiny.make_requests())
    finished = tiny.drain(generator)
    assert len(finished) == 12
    for record in finished:
        expected = reference_logp(model_dirs[family], record)
        # float32; small batches of a linear layer differ by up to 3e-5 from large ones on logits of
        # size 10
        np.testing.assert_allclose(record.columns["logp"], expected, atol=5e-5)
        assert record.columns["action_ids"].dtype == np.int32
        assert record.columns["temperature"] == np.float32(0.8)
    scored = generator.logprobs([record.columns for record in finished])
    for record, logp in zip(finished, scored, strict=True):
        np.testing.assert_allclose(logp, record.columns["logp"], atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_transformers_generate(
    family: str, open_generator: Any, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(family, temperature=0.5)
    generator.submit(tiny.make_requests(samples=1, greedy=True))
    model = AutoModelForCausalLM.from_pretrained(model_dirs[family], dtype=torch.float32)
    for record in tiny.drain(generator):
        prompt = torch.from_numpy(record.columns["prompt_ids"].astype(np.int64))[None]
        expected = model.generate(
            prompt, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(prompt)
        )
        np.testing.assert_array_equal(record.columns["action_ids"], expected[0, prompt.shape[1] :])
        assert record.columns["temperature"] == 1


def test_a_finished_record_says_how_it_ended(open_generator: Any) -> None:
    generator = open_generator(max_new_tokens=6)
    generator.submit(tiny.make_requests(groups=8, samples=8))
    finished = tiny.drain(generator)
    ends = {record.columns["action_ids"][-1] == 2 for record in finished}
    assert ends == {True, False}  # else the test shows nothing
    for record in finished:
        ended = record.columns["action_ids"][-1] == 2
        assert (record.status, record.reason) == (
            ("finished", "") if ended else ("truncated", "length")
        )
        assert (
            len(record.columns["action_ids"])
            == len(record.columns["logp"])
            == len(record.columns["action_mask"])
        )
        assert 2 not in record.columns["action_ids"][:-1]
        assert (
            len(bytes(record.columns["text"])) == len(record.columns["action_ids"]) - ended
            or (record.columns["action_ids"] < 3).any()
        )


def test_every_step_with_a_new_action_is_progress_and_no_other(open_generator: Any) -> None:
    """A long answer ends nothing for minutes."""
    shown: list[str] = []
    generator = open_generator(max_new_tokens=6)
    generator._context = replace(generator._context, progress=lambda: shown.append("progress"))
    assert generator.step() == []
    assert shown == []
    generator.submit(tiny.make_requests(groups=1, samples=2))
    steps = 0
    while generator._rows.count or generator._queue:
        generator.step()
        steps += 1
    assert len(shown) == steps > 1


def test_a_stop_string_ends_a_sample(open_generator: Any) -> None:
    generator = open_generator(stop=["1", "+"])
    generator.submit(tiny.make_requests(groups=4, samples=8))
    finished = tiny.drain(generator)
    stopped = [record for record in finished if record.reason == "stop"]
    assert stopped
    for record in finished:
        text = bytes(record.columns["text"]).decode()
        assert ("1" in text or "+" in text) == (record.reason == "stop")
        assert not set("1+") & set(text[:-1])


@pytest.mark.parametrize("decoder", ["fused", "transformers"])
def test_rows_that_leave_or_join_a_batch_do_not_change_the_others(
    decoder: str, open_generator: Any
) -> None:
    alone = open_generator(decoder=decoder)
    requests = tiny.make_requests(groups=4, samples=5)
    expected = {}
    for request in requests:
        alone.submit([request])
        (record,) = tiny.drain(alone)
        expected[request.ordinal, request.sample] = record
    crowded = open_generator(decoder=decoder, max_batch=6)
    crowded.submit(requests[:9])
    finished = crowded.step() + crowded.step()
    crowded.submit(requests[9:])
    finished += tiny.drain(crowded)
    assert len(finished) == len(requests)
    for record in finished:
        other = expected[record.request.ordinal, record.request.sample]
        np.testing.assert_array_equal(record.columns["action_ids"], other.columns["action_ids"])
        np.testing.assert_allclose(record.columns["logp"], other.columns["logp"], atol=5e-5)


def test_deterministic_batches_repeat_bit_for_bit(open_generator: Any) -> None:
    requests = tiny.make_requests(groups=4, samples=6)
    runs = []
    for order in (requests, requests[::-1]):
        generator = open_generator(deterministic=True, max_batch=10)
        generator.submit(order)
        runs.append(tiny.drain(generator))
    for one, other in zip(*runs, strict=True):
        assert one.columns["action_ids"].tobytes() == other.columns["action_ids"].tobytes()
        assert one.columns["logp"].tobytes() == other.columns["logp"].tobytes()


def test_aborted_samples_keep_what_they_have(
    open_generator: Any, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator(max_batch=6)
    generator.submit(tiny.make_requests(groups=2, samples=4))
    finished = [*generator.step(), *generator.step(), *generator.step()]
    done = {(f.request.ordinal, f.request.sample) for f in finished}
    running = [(w.request.ordinal, w.request.sample) for w in generator._rows.waiting]
    waiting = [(w.request.ordinal, w.request.sample) for w in generator._queue]
    assert running and waiting
    aborted = generator.abort([running[0], waiting[0], (99, 0)])
    assert [(f.request.ordinal, f.request.sample) for f in aborted] == [waiting[0], running[0]]
    assert {f.status for f in aborted} == {"aborted"}
    assert len(aborted[0].columns["action_ids"]) == 0
    assert len(aborted[1].columns["action_ids"]) == 3
    expected = reference_logp(model_dirs["llama"], aborted[1])
    np.testing.assert_allclose(aborted[1].columns["logp"], expected, atol=5e-5)
    rest = {(f.request.ordinal, f.request.sample) for f in tiny.drain(generator)}
    assert len(rest | done) == 6 and not rest & {running[0], waiting[0]}


def plan_of(
    generator: Any, arrays: dict[str, np.ndarray], version: int
) -> tuple[WeightPlan, list[Any]]:
    specs = generator.weight_specs()
    plan = WeightPlan(version, specs)
    return plan, [(spec, arrays[spec.name]) for spec in specs]


def push(generator: Any, arrays: dict[str, np.ndarray], version: int) -> None:
    plan, tensors = plan_of(generator, arrays, version)
    generator.begin_weights(plan)
    generator.load_weights(tensors[:3])
    generator.load_weights(tensors[3:])
    generator.commit_weights(plan)


def weights_of(generator: Any) -> dict[str, np.ndarray]:
    from gcore_language.weights import to_bytes

    return {name: to_bytes(tensor).copy() for name, tensor in generator._tensors.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_push_changes_outputs_and_the_old_weights_restore_them(
    family: str, open_generator: Any, tmp_path: Path
) -> None:
    tiny.save_model(tmp_path, family, seed=5)
    other = TorchGenerator(TorchGeneratorConfig(max_new_tokens=12), tiny.make_context(tmp_path))
    generator = open_generator(family)
    old, new = weights_of(generator), weights_of(other)
    requests = tiny.make_requests()

    def tokens(source: Any) -> list[list[int]]:
        source.submit(requests)
        return [f.columns["action_ids"].tolist() for f in tiny.drain(source)]

    before, expected = tokens(generator), tokens(other)
    assert before != expected
    push(generator, new, 1)
    assert generator.version == 1
    assert generator.fingerprint() == other.fingerprint()
    assert tokens(generator) == expected
    push(generator, old, 2)
    assert tokens(generator) == before


@pytest.mark.parametrize("decoder", ["fused", "transformers"])
def test_samples_running_during_a_push_continue_with_the_new_weights(
    decoder: str, open_generator: Any, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    tiny.save_model(tmp_path, "llama", seed=5)
    other = TorchGenerator(TorchGeneratorConfig(), tiny.make_context(tmp_path))
    generator = open_generator(decoder=decoder)
    generator.submit(tiny.make_requests(samples=6))
    before = [*generator.step(), *generator.step()]
    push(generator, weights_of(other), 7)
    after = tiny.drain(generator)
    assert {f.versions for f in before} <= {(0, 0)} and {f.versions for f in after} == {(0, 7)}
    for record in after:
        old, new = (reference_logp(d, record) for d in (model_dirs["llama"], tmp_path))
        np.testing.assert_allclose(record.columns["logp"][:2], old[:2], atol=5e-5)
        np.testing.assert_allclose(record.columns["logp"][2:], new[2:], atol=5e-5)
        assert record.columns["version"].tolist() == [0, 0] + [7] * (len(old) - 2)


def test_each_sample_keeps_its_own_versions_when_others_join_and_leave(
    open_generator: Any,
) -> None:
    generator = open_generator(max_new_tokens=12)
    weights = weights_of(generator)
    requests = tiny.make_requests(groups=2, samples=4)
    generator.submit(requests[:4])
    finished = [*generator.step(), *generator.step()]
    push(generator, weights, 7)
    generator.submit(requests[4:])
    finished += generator.step()
    finished += generator.abort([(requests[0].ordinal, requests[0].sample)])
    push(generator, weights, 9)
    finished += tiny.drain(generator)
    cut = 0
    for record in finished:
        count = len(record.columns["action_ids"])
        first = [7] if record.request in requests[4:] else [0, 0, 7]
        expected = (first + [9] * count)[:count]
        is_cut = len(set(expected)) > 1
        assert ("version" in record.columns) == is_cut
        cut += is_cut
        if is_cut:
            assert record.columns["version"].tolist() == expected
            assert record.columns["version"].dtype == np.int32
    assert cut >= 6


def test_a_push_of_another_model_is_refused_by_name(open_generator: Any) -> None:
    generator = open_generator()
    arrays = weights_of(generator)
    plan, tensors = plan_of(generator, arrays, 3)
    name = plan.tensors[0].name
    with pytest.raises(WeightMismatch, match=f"lacks tensor {name}"):
        generator.begin_weights(WeightPlan(3, plan.tensors[1:]))
    stranger = type(plan.tensors[0])("lm_head.scale", "F32", (1,), 4)
    with pytest.raises(WeightMismatch, match="lm_head.scale, which the model does not have"):
        generator.begin_weights(WeightPlan(3, [*plan.tensors, stranger]))
    wide = type(plan.tensors[0])(name, "F32", (22, 96), 22 * 96 * 4)
    with pytest.raises(
        WeightMismatch, match=rf"{name} has shape \(22, 96\) in the plan and \(22, 64\) here"
    ):
        generator.begin_weights(WeightPlan(3, [wide, *plan.tensors[1:]]))
    with pytest.raises(WeightMismatch, match="tensors came before their plan"):
        generator.load_weights(tensors)
    generator.begin_weights(plan)
    generator.load_weights(tensors[:-1])
    with pytest.raises(WeightMismatch, match=f"tensor {tensors[-1][0].name} has not come"):
        generator.commit_weights(plan)
    with pytest.raises(WeightMismatch, match="push has begun and was not committed"):
        generator.step()
    generator.load_weights(tensors[-1:])
    generator.commit_weights(plan)
    with pytest.raises(WeightMismatch, match="version 2 is older than 3"):
        generator.begin_weights(WeightPlan(2, plan.tensors))


def test_a_prompt_that_fills_the_context_fails_alone(open_generator: Any) -> None:
    generator = open_generator(context_length=8)
    long = SampleRequest(ordinal=9, sample=0, seed=1, prompt=Prompt(row=9, text="1+2+3+4="))
    generator.submit([long, *tiny.make_requests(groups=1, samples=1)])
    short, failed = tiny.drain(generator)
    why = "prompt_too_long: 9 tokens, and the context has 8"
    assert (failed.status, failed.reason, dict(failed.columns)) == ("failed", why, {})
    assert len(short.columns["action_ids"]) <= 8 - len(short.columns["prompt_ids"])


def test_chat_turns_go_through_the_tokenizers_template(
    open_generator: Any, model_dirs: dict[str, Path]
) -> None:
    generator = open_generator()
    turns = [{"role": "user", "content": "1+2"}, {"role": "user", "content": "3"}]
    generator.submit(
        [SampleRequest(ordinal=0, sample=0, seed=0, prompt=Prompt(row=0, messages=turns))]
    )
    (record,) = tiny.drain(generator)
    tokenizer = AutoTokenizer.from_pretrained(model_dirs["llama"])
    assert record.columns["prompt_ids"].tolist() == tokenizer("1+23:").input_ids


def test_variables_of_the_template_come_from_the_settings(
    open_generator: Any, model_dirs: dict[str, Path]
) -> None:
    """As those with which a model of Qwen3 is told not to think."""
    generator = open_generator(chat_template_kwargs={"thinks": False})
    turns_alone = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    generator._tokenizer.chat_template = turns_alone + "{% if thinks is false %}+0{% endif %}="
    turns = [{"role": "user", "content": "1+2"}]
    generator.submit(
        [SampleRequest(ordinal=0, sample=0, seed=0, prompt=Prompt(row=0, messages=turns))]
    )
    (record,) = tiny.drain(generator)
    tokenizer = AutoTokenizer.from_pretrained(model_dirs["llama"])
    expected = tokenizer("1+2+0=", add_special_tokens=False).input_ids
    assert record.columns["prompt_ids"].tolist() == expected


def test_bfloat16_samples_match_the_forward_pass_of_the_model(open_generator: Any) -> None:
    generator = open_generator("qwen2", dtype="bfloat16", decoder="fused")
    generator.submit(tiny.make_requests())
    finished = tiny.drain(generator)
    for record, logp in zip(
        finished, generator.logprobs([f.columns for f in finished]), strict=True
    ):
        assert record.columns["logp"].dtype == np.float32
        # 8 bits of mantissa: logits of size 5 are off by 0.02 each
        np.testing.assert_allclose(record.columns["logp"], logp, atol=0.15)


def test_settings_for_an_engine_are_refused(model_dirs: dict[str, Path]) -> None:
    context = tiny.make_context(model_dirs["llama"], engine={"enforce_eager": True})
    with pytest.raises(ConfigError, match="no engine, so it cannot pass on enforce_eager"):
        TorchGenerator(TorchGeneratorConfig(), context)


def test_uniforms_depend_on_seed_and_position_alone_and_are_uniform() -> None:
    seeds = np.random.default_rng(0).integers(0, 2**63, 4000).astype(np.uint64)
    grid = np.stack([uniforms(seeds, np.full(4000, position)) for position in range(8)])
    assert grid.min() >= 0 and grid.max() < 1
    np.testing.assert_array_equal(uniforms(seeds[5:6], np.array([3])), grid[3, 5:6])
    counts = np.histogram(grid, 64, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 110  # chi-square of 63 degrees, p = 2e-4
    assert np.abs(np.corrcoef(grid) - np.eye(8)).max() < 0.06


def test_sampled_frequencies_follow_the_softmax() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 2
    draws = uniforms(np.arange(20000, dtype=np.uint64), np.zeros(20000, np.int64))
    tokens, logp, _ = choose(logits.expand(20000, 12), torch.from_numpy(draws), 0.7, None)
    expected = (logits / 0.7).softmax(-1)
    torch.testing.assert_close(tokens.bincount(minlength=12) / 20000, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(logp, expected.log()[tokens])


def test_top_p_and_top_k_narrow_the_choice_but_not_the_logp() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log().expand(500, 4)
    draws = torch.from_numpy(uniforms(np.arange(500, dtype=np.uint64), np.zeros(500, np.int64)))
    for limits, allowed in (
        ({"top_p": 0.65}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
    ):
        tokens, logp, _ = choose(logits, draws, 1.0, None, **limits)
        assert set(tokens.tolist()) == allowed
        torch.testing.assert_close(logp, probabilities.log()[tokens])


@pytest.mark.parametrize("actions", [40, 700])
def test_a_cache_on_a_cpu_is_never_larger_than_foreseen(
    actions: int, model_dirs: dict[str, Path]
) -> None:
    """Short answers have room from the start; for long ones it grows, and two are there at once."""
    model = load_model(str(model_dirs["llama"]), dtype="float32")
    decoder = FusedDecoder(model, 4, Products(may_pack=False), actions)
    decoder.prefill([np.arange(3, 10)], [3])
    columns = [decoder._cache.shape[4]]
    for _ in range(actions - 1):
        decoder.advance(torch.tensor([4, 5, 6]))
        columns.append(decoder._cache.shape[4])
    grown = [(before, after) for before, after in itertools.pairwise(columns) if before != after]
    held = max(columns[0], *(before + after for before, after in grown), columns[-1])
    assert held == most_columns_on_cpu(7, actions)
    assert bool(grown) == (actions > 256)


def decoders_of(model_dir: Path) -> tuple[FusedDecoder, FusedDecoder, list[int]]:
    """Returns one that keeps what prompts begin with, one that does not, and what is read.

    The list grows by the number of tokens of each pass of the first one.
    """
    model = load_model(str(model_dir), dtype="float32")
    keeps, plain = (
        FusedDecoder(model, 16, Products(may_pack=False), may_keep=may) for may in (True, False)
    )
    read: list[int] = []
    usual = keeps._read

    def counted(ids: np.ndarray, *rest: Any) -> torch.Tensor:
        read.append(ids.size)
        return usual(ids, *rest)

    keeps._read = counted  # type: ignore[method-assign]
    return keeps, plain, read


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_prompts_begin_with_is_read_once_and_changes_no_logits(
    family: str, model_dirs: dict[str, Path]
) -> None:
    """Within the bits that another shape of a product costs. Rows join, leave and go on."""
    keeps, plain, read = decoders_of(model_dirs[family])
    question = np.arange(20) % 17 + 3
    behind = [[3], [4, 5, 6], [7, 8], [9, 10, 11, 12, 13]]
    prompts = [np.concatenate([question, end]) for end in behind]

    def alike(logits: list[torch.Tensor]) -> None:
        torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)

    both = keeps, plain
    alike([decoder.prefill(prompts[:2], [2, 1]) for decoder in both])
    assert read == [20, 2 * 3]  # the beginning; two ends, of which one is padded
    alike([decoder.advance(torch.tensor([5, 6, 7])) for decoder in both])
    alike([decoder.prefill(prompts[2:3], [3]) for decoder in both])
    assert read[2:] == [2]  # the end alone: the beginning was kept
    alike([decoder.advance(torch.arange(3, 9)) for decoder in both])
    removed = np.array([True, False, False, True, False, False])
    assert keeps.drop(removed).tolist() == plain.drop(removed).tolist()
    alike([decoder.prefill(prompts[3:], [1]) for decoder in both])
    for _ in range(3):
        alike([decoder.advance(torch.arange(3, 8)) for decoder in both])
    for decoder in both:
        decoder.drop(np.ones(5, bool))
    others = [np.arange(10, 20), question[::-1]]
    alike([decoder.prefill(others, [1, 1]) for decoder in both])
    assert read[-1] == 2 * 20  # these have nothing in common


def test_a_prompt_that_is_the_beginning_of_others_is_read_to_its_end(
    model_dirs: dict[str, Path],
) -> None:
    keeps, plain, read = decoders_of(model_dirs["llama"])
    question = np.arange(20) % 17 + 3
    prompts = [question, np.concatenate([question, [5, 6]])]
    logits = [decoder.prefill(prompts, [1, 1]) for decoder in (keeps, plain)]
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)
    assert read == [19, 2 * 3]


def test_new_weights_read_again_what_prompts_begin_with(
    open_generator: Any, tmp_path: Path
) -> None:
    generator = open_generator()
    decoder = generator._usual
    prompts = [np.concatenate([np.arange(20) % 17 + 3, [end]]) for end in (4, 5)]
    decoder.prefill(prompts, [1, 1])
    decoder.drop(np.ones(2, bool))
    assert len(decoder._kept.longest(prompts[0])[0].ids) == 20
    tiny.save_model(tmp_path, "llama", seed=5)
    other = TorchGenerator(TorchGeneratorConfig(max_new_tokens=12), tiny.make_context(tmp_path))
    push(generator, weights_of(other), 1)
    logits = [one._usual.prefill(prompts, [1, 1]) for one in (generator, other)]
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)


def test_new_weights_read_again_what_prompts_of_aborted_samples_begin_with(
    open_generator: Any, tmp_path: Path
) -> None:
    """Where all that ran at a push is aborted before the next step."""
    tiny.save_model(tmp_path, "llama", seed=5)
    other = TorchGenerator(TorchGeneratorConfig(), tiny.make_context(tmp_path))
    generator = open_generator()
    requests = [
        SampleRequest(
            ordinal=end,
            sample=0,
            seed=end,
            prompt=Prompt(row=end, text=f"1+2+3+4+5+6+7+8+9+{end}="),
        )
        for end in range(3)
    ]
    generator.submit(requests)
    generator.step()
    push(generator, weights_of(other), 1)
    generator.abort([(request.ordinal, 0) for request in requests])
    generator.submit(requests)
    for record in tiny.drain(generator):
        expected = reference_logp(tmp_path, record)
        np.testing.assert_allclose(record.columns["logp"], expected, atol=5e-5)


def test_a_deterministic_run_reads_each_prompt_whole(open_generator: Any) -> None:
    """What it reads must not depend on what it has read before."""
    assert not open_generator(deterministic=True)._usual._may_keep
    assert open_generator()._usual._may_keep
