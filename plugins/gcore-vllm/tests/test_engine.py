"""The real engine against transformers' forward pass, in float32. All tests of a file share a few
engines.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language import testing
from gcore_language.engine_tests import PushTests
from gcore_language.model_files import weights_sha256
from gcore_language.testing import assert_agree, drain, gaps, run, tensors_of
from gcore_testing.contracts.weights import push
from gcore_testing.safetensors_files import read_safetensors
from gcore_vllm import ENGINES
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.engine import VllmGenerator

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError, WeightMismatch
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import AdapterFacts, Prompt, WeightPlan
from tests.support.broken_models import make_directory

pytestmark = pytest.mark.engine

END = 2
ALPHA = 8.0  # of the adapters that ``save_adapter`` saves
LONG = "1+" * 40 + "1="  # more than a block of the prefix cache
PROMPTS = ("1+2=", "7", "12+34=", LONG)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of each family that differ in their weights only."""
    from gcore_language.tiny import save_model

    found = {}
    for family in ("llama", "qwen2"):
        for seed, name in enumerate((family, f"{family}-other")):
            found[name] = tmp_path_factory.mktemp(name)
            save_model(found[name], family, seed=seed)
    found["padded"] = tmp_path_factory.mktemp("padded")
    save_model(found["padded"], "llama", untold=42)
    return found


@pytest.fixture(scope="module")
def opened(directories: dict[str, Path]) -> Iterator[Callable[..., VllmGenerator]]:
    """Makes a generator, or gives the one that was made with the same settings."""
    made: dict[str, VllmGenerator] = {}

    def make(
        name: str = "llama", engine: dict[str, Any] | None = None, **settings: Any
    ) -> VllmGenerator:
        key = repr((name, engine, sorted(settings.items())))
        if key not in made:
            config = VllmGeneratorConfig(**{"max_new_tokens": 12, "kv_cache_gib": 0.05, **settings})
            model = {"path": str(directories[name])}
            made[key] = VllmGenerator(
                config, WorkerContext(role="rollout", model=model, engine=engine or {})
            )
        return made[key]

    yield make
    for generator in made.values():
        generator.close()


def requests_of(
    prompts: Sequence[str] = PROMPTS, samples: int = 6, *, greedy: bool = False
) -> list[SampleRequest]:
    return testing.requests_of(prompts, samples, greedy=greedy)


def test_the_imported_engine_is_vllm() -> None:
    import vllm

    installed = {name: version for name in ENGINES for version in _versions(name)}
    assert len(installed) == 1
    assert next(iter(installed.values())).startswith("0.3")
    files = importlib.metadata.files(next(iter(installed))) or []
    assert Path(str(vllm.__file__)).resolve() in {
        Path(str(file.locate())).resolve() for file in files
    }


def _versions(name: str) -> list[str]:
    try:
        return [importlib.metadata.version(name)]
    except importlib.metadata.PackageNotFoundError:
        return []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"temperature": 0.6}),
        ("llama", {"temperature": 1.5, "top_p": 0.7, "top_k": 8}),
    ],
)
def test_logp_matches_the_full_softmax_at_the_temperature(
    name: str, settings: dict[str, Any], opened: Any, directories: dict[str, Path]
) -> None:
    generator = opened(name, **settings)
    requests = [
        SampleRequest(
            ordinal=r.ordinal, sample=r.sample, seed=r.seed, prompt=r.prompt, greedy=r.sample == 0
        )
        for r in requests_of()
    ]
    records = run(generator, requests)
    assert {float(r.columns["temperature"]) for r in records if r.request.greedy} == {1.0}
    expected = np.float32(settings.get("temperature", 1.0))
    assert {r.columns["temperature"][()] for r in records if not r.request.greedy} == {expected}
    assert_agree(gaps(records, directories[name]))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_ids_without_a_token_are_never_sampled_and_count_in_log_probs(
    settings: dict[str, Any], opened: Any, directories: dict[str, Path]
) -> None:
    from gcore_language.tiny import VOCABULARY

    generator = opened("padded", **settings)
    greedy = requests_of(samples=1, greedy=True)
    records = run(generator, requests_of(samples=12)) + run(generator, greedy)
    assert max(int(record.columns["action_ids"].max()) for record in records) < VOCABULARY
    assert_agree(gaps(records, directories["padded"]))


def test_top_k_limits_sampling_to_the_k_likeliest_tokens(opened: Any) -> None:
    generator = opened("llama", temperature=1.5, top_p=0.7, top_k=8)
    first = {r.columns["action_ids"][0] for r in run(generator, requests_of(("1+2=",), 64))}
    assert 1 < len(first) <= 8


def test_the_end_token_is_the_last_action(opened: Any) -> None:
    records = run(opened("llama"), requests_of(samples=12))
    ended = [r for r in records if r.status == "finished"]
    cut = [r for r in records if r.status == "truncated"]
    assert ended and cut  # else the test shows nothing
    for record in ended:
        assert record.reason == ""
        assert record.columns["action_ids"][-1] == END
        assert END not in record.columns["action_ids"][:-1]
    for record in cut:
        assert record.reason == "length"
        assert record.columns["action_ids"].size == 12
        assert END not in record.columns["action_ids"]


def test_a_stop_string_ends_a_sample_and_stays_in_its_text(
    opened: Any, directories: dict[str, Path]
) -> None:
    records = run(opened("llama", stop=["12", "+"]), requests_of(samples=12))
    texts = [r.columns["text"].tobytes().decode() for r in records]
    assert {r.reason for r in records} >= {"stop", ""}
    for record, text in zip(records, texts, strict=True):
        assert (record.reason == "stop") == text.endswith(("12", "+"))
        assert "+" not in text[:-1]
    assert_agree(gaps(records, directories["llama"]))


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(opened: Any) -> None:
    generator = opened("llama")
    requests = requests_of()
    crowd = {
        (r.request.ordinal, r.request.sample): r.columns["action_ids"].tolist()
        for r in run(generator, requests)
    }
    for request in requests[::5]:
        (alone,) = run(generator, [request])
        assert alone.columns["action_ids"].tolist() == crowd[request.ordinal, request.sample]


def test_prompts_that_do_not_fit_into_one_step_wait_for_the_next(
    opened: Any, directories: dict[str, Path]
) -> None:
    """vLLM would read one of them in pieces, and fail to wind back its random generator."""
    generator = opened("llama", max_batch=16, engine={"max_num_batched_tokens": 128})
    assert_agree(
        gaps(
            run(generator, requests_of([f"{i}{LONG[:60]}" for i in range(9)], 1)),
            directories["llama"],
        )
    )
    with pytest.raises(
        ConfigError,
        match=r"roles\.rollout\.engine\.enable_chunked_prefill: vLLM cannot read prompts",
    ):
        opened("llama", engine={"enable_chunked_prefill": True})


def test_samples_of_a_prompt_share_its_blocks(opened: Any) -> None:
    generator = opened("llama")
    seen = []
    step = generator._engine.step

    def spy() -> Any:
        outputs = step()
        seen.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    generator._engine.step = spy
    try:
        run(generator, requests_of(("9" + LONG,), 4))
    finally:
        generator._engine.step = step
    assert sorted(seen) == [0, 64, 64, 64]


class TestPushes(PushTests):
    prompts = PROMPTS

    @pytest.fixture(params=["llama", "qwen2"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def generator(self, opened: Any, family: str) -> VllmGenerator:
        generator: VllmGenerator = opened(family)
        return generator


def test_a_push_without_cache_reset_would_mix_log_probs_of_two_weights(
    opened: Any, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = opened("llama")
    requests = requests_of((LONG,))
    run(generator, requests)  # fills the cache
    with monkeypatch.context() as patched:
        patched.setattr(VllmGenerator, "_forget_cache", lambda self: None)
        push(generator, tensors_of(directories["llama-other"]), generator.version + 1)
        assert gaps(run(generator, requests), directories["llama-other"]).max() > 1e-2
    push(generator, tensors_of(directories["llama-other"]), generator.version + 1)
    assert_agree(gaps(run(generator, requests), directories["llama-other"]))
    push(generator, tensors_of(directories["llama"]), generator.version + 1)


def test_a_cache_that_vllm_does_not_reset_stops_the_run(
    opened: Any, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = opened("llama")
    version = generator.version
    with monkeypatch.context() as patched:
        patched.setattr(generator._engine, "reset_prefix_cache", lambda **_: False)
        with pytest.raises(WeightMismatch, match="vLLM kept keys and values of the old weights"):
            push(generator, tensors_of(directories["llama"]), version + 1)
    assert generator.version == version
    with pytest.raises(WeightMismatch, match="has begun and was not committed"):
        generator.step()
    push(generator, tensors_of(directories["llama"]), version + 1)
    assert generator.step() == []


def test_samples_running_during_a_push_continue_with_the_new_weights(
    opened: Any, directories: dict[str, Path]
) -> None:
    generator = opened("llama")
    requests = requests_of()
    generator.submit(requests)
    before = [*generator.step(), *generator.step()]
    old = generator.version
    push(generator, tensors_of(directories["llama-other"]), old + 1)
    after = drain(generator, len(requests) - len(before))
    assert {record.versions for record in after} == {(old, old + 1)}
    assert_agree(gaps(after, directories["llama"], slice(0, 2)))
    assert_agree(gaps(after, directories["llama-other"], slice(2, None)))
    push(generator, tensors_of(directories["llama"]), old + 2)


def test_aborted_samples_keep_what_they_have(opened: Any, directories: dict[str, Path]) -> None:
    generator = opened("llama", max_batch=3)
    generator.submit(requests_of((LONG,)))
    ended = [*generator.step(), *generator.step(), *generator.step()]
    keys = [
        (0, sample)
        for sample in range(6)
        if (0, sample) not in {(0, r.request.sample) for r in ended}
    ]
    aborted = generator.abort([*keys, (99, 0)])
    assert [(r.request.ordinal, r.request.sample) for r in aborted] == keys
    assert {r.status for r in aborted} == {"aborted"}
    assert {r.columns["action_ids"].size for r in aborted} >= {0, 3}
    assert_agree(gaps([r for r in aborted if r.columns["action_ids"].size], directories["llama"]))
    assert generator.step() == []


def test_a_prompt_that_fills_the_context_fails_alone(opened: Any) -> None:
    generator = opened("llama", context_length=8)
    prompts = ("1+2+3+4=", "1+2=", "1+2+3+")
    failed, short, tight = sorted(
        run(generator, requests_of(prompts, 1)), key=lambda r: r.request.ordinal
    )
    why = "prompt_too_long: 9 tokens, and the context has 8"
    assert (failed.status, failed.reason, dict(failed.columns)) == ("failed", why, {})
    assert short.columns["action_ids"].size <= 3
    assert tight.columns["action_ids"].size == 1


def test_chat_turns_go_through_the_tokenizers_template(opened: Any) -> None:
    generator = opened("llama")
    turns = [{"role": "user", "content": "1+2"}, {"role": "user", "content": "3"}]
    (record,) = run(
        generator,
        [SampleRequest(ordinal=0, sample=0, seed=0, prompt=Prompt(row=0, messages=turns))],
    )
    assert record.columns["prompt_ids"].tolist() == generator._tokenizer("1+23:").input_ids


def test_an_image_for_a_text_model_is_refused(opened: Any) -> None:
    shown = Prompt(row=7, text="1+2=", images=["photos/17.png"])
    with pytest.raises(
        DataError,
        match=r"photos/17\.png: row 7 names 1 images, and this generator or its model takes",
    ):
        opened("llama").submit(testing.requests_of([shown]))


def test_bfloat16_weights_take_float32_pushes(opened: Any, directories: dict[str, Path]) -> None:
    generator = opened("llama", dtype="bfloat16")
    push(generator, tensors_of(directories["llama-other"]), generator.version + 1)
    records = run(generator, requests_of())
    assert {r.columns["logp"].dtype for r in records} == {np.dtype(np.float32)}
    found = gaps(records, directories["llama-other"])
    assert np.median(found) < 0.05  # 8 bits of mantissa: logits of size 5 are off by 0.02 each
    assert np.median(gaps(records, directories["llama"])) > 0.2


def test_a_misspelt_engine_argument_is_reported(opened: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"vLLM has no engine argument 'gpu_memory_utilisation' \(did you mean 'gpu_",
    ):
        opened("llama", engine={"gpu_memory_utilisation": 0.5})


def test_a_model_without_vllm_kernels_is_reported(tmp_path: Path) -> None:
    from gcore_language.tiny import save_model

    save_model(tmp_path, "llama-head16")
    with pytest.raises(
        DataError,
        match="(?s)vLLM does not start with this model.*head_dim=16.*heads have a size vLLM",
    ):
        VllmGenerator(
            VllmGeneratorConfig(), WorkerContext(role="rollout", model={"path": str(tmp_path)})
        )


def test_a_model_split_over_two_devices_samples_and_takes_pushes_like_an_unsplit_one(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    config = VllmGeneratorConfig(max_new_tokens=12, kv_cache_gib=0.05, top_k=8)
    model = {"path": str(directories["qwen2"])}
    generator = VllmGenerator(config, WorkerContext(role="rollout", model=model, devices=(0, 1)))
    assert len(multiprocessing.active_children()) == 2
    assert generator.push_offers() == {}  # memory of this process is not theirs
    for source in ("qwen2", "qwen2-other"):
        push(generator, tensors_of(directories[source]), generator.version + 1)
        assert_agree(gaps(run(generator, requests_of()), directories[source]))
    generator.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("name", "rank"), [("llama", 4), ("qwen2", 9)])
def test_adapter_log_probs_match_merged_weights_before_and_after_a_push(
    name: str,
    rank: int,
    directories: dict[str, Path],
    save_adapter: Any,
    merge: Any,
    tmp_path: Path,
) -> None:
    adapter = save_adapter(tmp_path / "adapter", directories[name], rank)
    config = VllmGeneratorConfig(max_new_tokens=12, kv_cache_gib=0.05, lora_path=str(adapter))
    generator = VllmGenerator(
        config, WorkerContext(role="rollout", model={"path": str(directories[name])})
    )
    for source in (name, f"{name}-other", name):
        merged = merge(tmp_path / f"merged-{generator.version}", directories[source], adapter)
        records = run(generator, requests_of())
        assert_agree(gaps(records, merged))
        assert gaps(records, directories[source]).max() > 0.1  # else the adapter shows nothing
        push(
            generator,
            tensors_of(directories[f"{name}-other" if source == name else name]),
            generator.version + 1,
        )
    generator.close()


def test_an_adapter_that_vllm_refuses_is_reported(
    directories: dict[str, Path], save_adapter: Any, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path, directories["llama"], use_dora=True)
    context = WorkerContext(role="rollout", model={"path": str(directories["llama"])})
    with pytest.raises(
        DataError,
        match=f"(?s){tmp_path}: vLLM does not take this adapter.*does not yet support DoRA",
    ):
        VllmGenerator(VllmGeneratorConfig(kv_cache_gib=0.05, lora_path=str(adapter)), context)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_pushed_adapters_are_added_by_vllm_and_give_the_log_probs_of_merged_weights(
    name: str, directories: dict[str, Path], save_adapter: Any, merge: Any, tmp_path: Path
) -> None:
    """Of all samples, also of those that run during the push; each takes the place of the last."""
    model = directories[name]
    config = VllmGeneratorConfig(max_new_tokens=12, kv_cache_gib=0.05, lora_rank=8)
    generator = VllmGenerator(config, WorkerContext(role="rollout", model={"path": str(model)}))
    records = run(generator, requests_of())
    assert_agree(gaps(records, model))
    base = weights_sha256(model)
    for version, rank in enumerate((4, 8, 3), 1):
        adapter = save_adapter(tmp_path / f"adapter-{rank}", model, rank)
        tensors = read_safetensors(adapter / "adapter_model.safetensors")
        tensors = sorted(tensors, key=lambda item: item[0].name)
        targets = [
            spec.name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            for spec, _ in tensors
            if ".lora_A." in spec.name
        ]
        facts = AdapterFacts(rank, ALPHA / rank, targets, base)
        plan = WeightPlan(version, [spec for spec, _ in tensors], facts)
        running = requests_of()
        generator.submit(running)
        ended = generator.step()
        generator.begin_weights(plan)
        generator.load_weights(tensors)
        generator.commit_weights(plan)
        drain(generator, len(running) - len(ended))
        merged = merge(tmp_path / f"merged-{rank}", model, adapter)
        records = run(generator, requests_of())
        assert {record.versions for record in records} == {(version, version)}
        assert_agree(gaps(records, merged))
        assert gaps(records, model).max() > 0.1  # else the adapter shows nothing
    other = WeightPlan(4, plan.tensors, AdapterFacts(3, 1.0, targets, "0" * 64))
    with pytest.raises(WeightMismatch, match="another base"):
        generator.begin_weights(other)
    folder = generator._pushed.directory
    generator.close()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["a tensor is missing", "names are peft's", "a weight is NaN"])
def test_weights_that_are_not_the_models_are_refused_before_vllm_loads_them(
    kind: str, tmp_path: Path
) -> None:
    """vLLM itself would start, and sample from what is left."""
    model = make_directory(kind, tmp_path / "model")
    with pytest.raises(DataError, match=str(model)) as caught:
        VllmGenerator(
            VllmGeneratorConfig(), WorkerContext(role="rollout", model={"path": str(model)})
        )
    assert "vLLM" not in str(caught.value)
