"""What needs no engine: settings, names of server arguments, files of a push, the check before a
run.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gcore_sglang
import numpy as np
import pytest
from gcore_language.images import Images
from gcore_sglang.arguments import ARGUMENTS, lora_arguments
from gcore_sglang.buckets import bucket_directory
from gcore_sglang.client import Event
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator
from gcore_sglang.parts import action_versions, joined
from gcore_sglang.pixels import PixelFiles, check_patches
from gcore_sglang.scoring import check_scorable, scored
from gcore_sglang.server import _cores
from gcore_testing.installed import Wheel, empty_venv
from gcore_testing.safetensors_files import Tensors, read_safetensors

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import ConfigError, ContractError, DataError, WorkerError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt, TensorSpec

KNOWN = ["attention_backend", "chunked_prefill_size", "mem_fraction_static", "port"]
TENSORS: Tensors = [
    (TensorSpec("a.weight", "F32", (2, 3), 24), np.arange(24, dtype=np.uint8)),
    (TensorSpec("b.bias", "BF16", (5,), 10), np.arange(10, dtype=np.uint8)),
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kv_cache_tokens": 0}, "kv_cache_tokens: must be positive, is 0"),
        ({"start_timeout_s": 0.0}, r"start_timeout_s: must be positive, is 0\.0"),
        ({"push_timeout_s": -1.0}, r"push_timeout_s: must be positive, is -1\.0"),
        ({"top_p": 2.0}, r"top_p: must be in 0\.\.1"),
        ({"tensor_parallel": 0}, "tensor_parallel: must be at least 1, is 0"),
        ({"lora_rank": -1}, "lora_rank: must not be negative, is -1"),
        ({"lora_rank": 8, "stop": ["."]}, "lora_rank: must be 0 with stop"),
    ],
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SglangGeneratorConfig(**setting)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dtype",
            r"(?s)engine\.dtype: this argument is set by another key"
            r".*Set roles\.rollout\.config\.dtype",
        ),
        ("model_path", r"Set roles\.rollout\.model\.path"),
        ("random_seed", r"Set run\.seed"),
        ("enable_lora", r"Set roles\.rollout\.config\.lora_rank"),
        ("lora_paths", r"(?s)this argument is fixed.*pushes bring"),
        ("dp_size", r"(?s)this argument is fixed.*one replica on one node"),
        ("tp_size", r"(?s)this argument is fixed.*placement gives to one worker"),
        ("api_key", r"(?s)this argument is fixed.*drawn anew"),
        ("host", r"(?s)this argument is fixed.*its own worker only"),
    ],
)
def test_an_engine_argument_that_cannot_be_set_is_refused(name: str, message: str) -> None:
    ARGUMENTS.check_set_here({"port": 1, "mem_fraction_static": 0.5}, "rollout")
    with pytest.raises(ConfigError, match=message):
        ARGUMENTS.check_set_here({"port": 1, name: 1}, "rollout")


def test_an_engine_argument_that_sglang_does_not_have_is_refused() -> None:
    ARGUMENTS.check_known({"port": 1}, KNOWN, "rollout")
    with pytest.raises(
        ConfigError,
        match=r"engine\.mem_fraction: SGLang has no server argument.*did you mean 'mem_fr",
    ):
        ARGUMENTS.check_known({"port": 1, "mem_fraction": 0.5}, KNOWN, "rollout")


def test_a_bucket_is_a_private_file_that_is_removed_after_use(tmp_path: Path) -> None:
    with bucket_directory(tmp_path, TENSORS) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (file,) = directory.iterdir()
        found = read_safetensors(file)
        assert [spec for spec, _ in found] == [spec for spec, _ in TENSORS]
        for (_, one), (_, other) in zip(found, TENSORS, strict=True):
            np.testing.assert_array_equal(one, other)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_was_not_loaded_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"), bucket_directory(tmp_path, TENSORS):
        raise RuntimeError("no")
    assert list(tmp_path.iterdir()) == []


def test_error_for_a_bucket_without_room_names_its_size(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"(?s)a bucket of 34 bytes cannot be written.*shared memory"
    ):
        with bucket_directory(tmp_path / "missing", TENSORS):
            pass


def test_pixels_share_one_file_until_their_last_sample_ends(tmp_path: Path) -> None:
    files = PixelFiles(tmp_path)
    one, other = (
        Images(pixels=np.full((4, 2), i, np.float32), grid=np.array([[1, 2, 2]])) for i in range(2)
    )
    shown = [files.show(images) for images in (one, other, one)]
    assert len({*shown}) == len(list(tmp_path.iterdir())) == 2
    files.release(one)
    with np.load(shown[0]) as told:
        np.testing.assert_array_equal(told["pixels"], one.pixels)
        np.testing.assert_array_equal(told["grid"], one.grid)
    files.release(one)
    assert [str(file) for file in tmp_path.iterdir()] == [shown[1]]


def test_error_for_pixels_without_room_names_their_size(tmp_path: Path) -> None:
    images = Images(pixels=np.zeros((4, 2), np.float32), grid=np.array([[1, 2, 2]]))
    with pytest.raises(
        WorkerError, match=r"(?s)pixels of 32 bytes cannot be written.*shared memory"
    ):
        PixelFiles(tmp_path / "missing").show(images)


def test_a_model_whose_patches_sglang_would_misread_is_refused() -> None:
    vision = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 14}
    check_patches(SimpleNamespace(vision_config=SimpleNamespace(**vision)), "model")
    with pytest.raises(
        DataError,
        match="model: SGLang does not encode this model's images: a patch has 1536 numbers",
    ):
        check_patches(
            SimpleNamespace(vision_config=SimpleNamespace(**vision | {"patch_size": 16})), "model"
        )


def python_with(root: Path, distribution: str, version: str) -> str:
    """The interpreter of a virtual environment that has one distribution."""
    wheel = Wheel(distribution=distribution, version=version, requires=())
    empty_venv(root).add("none", wheel=wheel)
    return str(root / "bin" / "python")


def test_a_run_is_checked_for_the_engine_in_the_roles_interpreter(tmp_path: Path) -> None:
    versions = {"right": ("sglang", "0.5.23"), "old": ("sglang", "0.4.9"), "none": ("numpy", "2.0")}
    pythons = {name: python_with(tmp_path / name, *versions[name]) for name in versions}
    roles = {name: {"use": "sglang", "python": python} for name, python in pythons.items()}
    roles["policy"] = {"use": "torch", "python": pythons["none"]}
    old, none = gcore_sglang.gcore_check({"roles": roles})
    assert old.startswith(
        f"roles.old.python: {pythons['old']} has sglang 0.4.9, but this needs sglang>=0.5.23,<0.6;"
    )
    assert none.startswith(
        f"roles.none.python: {pythons['none']} has no SGLang, but this needs sglang"
    )


def test_an_argument_that_is_set_elsewhere_is_refused_at_check(tmp_path: Path) -> None:
    engine = {"port": 1, "dtype": "float32", "host": "0.0.0.0"}
    python = python_with(tmp_path, "sglang", "0.5.23")
    role = {"use": "sglang", "python": python, "engine": engine}
    dtype, host = gcore_sglang.gcore_check({"roles": {"rollout": role}})
    assert dtype.startswith("roles.rollout.engine.dtype: this argument is set by another key; set")
    assert host.startswith("roles.rollout.engine.host: this argument is fixed; the server listens")


@pytest.mark.parametrize(
    ("use", "config", "reasons"),
    [
        ("sglang", {"tensor_parallel": 2}, []),
        ("sglang/deterministic", {"tensor_parallel": 1}, []),
        ("sglang/deterministic", {"tensor_parallel": 2}, ["repeat from their seeds was not tried"]),
        ("sglang", {"tensor_parallel": 2, "lora_rank": 8}, ["adapters pushed into a model on 2"]),
        (
            "sglang/deterministic",
            {"tensor_parallel": 4, "lora_rank": 8},
            ["on 4 devices repeat", "adapters pushed into a model on 4"],
        ),
    ],
)
def test_devices_that_share_a_model_with_seeds_or_adapters_are_refused_with_a_reason(
    use: str, config: dict[str, int], reasons: list[str]
) -> None:
    told = list(gcore_sglang.check_split("rollout", {"use": use, "config": config}))
    assert len(told) == len(reasons)
    for problem, reason in zip(told, reasons, strict=True):
        assert problem.startswith("roles.rollout.config.tensor_parallel: ") and reason in problem


def test_sleep_is_refused_where_there_is_no_cuda() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    pytest.importorskip("aiohttp")
    from gcore_sglang.sleeping import SleepingSglangGenerator

    with pytest.raises(
        ConfigError,
        match=r"(?s)roles\.rollout\.use: this engine can sleep only with CUDA.*Use sglang\.",
    ):
        SleepingSglangGenerator(SglangGeneratorConfig(), WorkerContext(role="rollout"))


def test_arguments_that_repeat_samples_are_not_overridden_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from gcore_sglang.deterministic import DeterministicSglangGenerator

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        SglangGenerator, "__init__", lambda self, config, context: seen.append(context.engine)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def start(**engine: Any) -> None:
        context = WorkerContext(role="rollout", engine=engine)
        DeterministicSglangGenerator(SglangGeneratorConfig(), context)

    start(mem_fraction_static=0.3)
    assert seen[0]["mem_fraction_static"] == 0.3
    assert seen[0]["disable_radix_cache"] and seen[0]["chunked_prefill_size"] == -1
    with pytest.raises(ConfigError, match="engine.disable_radix_cache: this provider needs True"):
        start(disable_radix_cache=False)


def test_an_adapter_has_a_directory_after_a_server_had_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose port was taken removes what lies in the private directory when it ends."""
    pytest.importorskip("torch")
    from gcore_language.tiny import save_model

    class Restarted:
        private = tmp_path / "private"

        def __init__(self, *_: Any, **__: Any) -> None:
            self.private.mkdir()

        def start(self, timeout_s: float) -> SimpleNamespace:
            shutil.rmtree(self.private)
            self.private.mkdir()
            return SimpleNamespace(call=lambda *_: '{"max_req_input_len": 64}')

    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model", "llama")
    monkeypatch.setattr("gcore_sglang.engine.Server", Restarted)
    context = WorkerContext(role="rollout", model={"path": str(tmp_path / "model")})
    SglangGenerator(SglangGeneratorConfig(lora_rank=8), context)
    assert (Restarted.private / "adapter").is_dir()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_message_of_a_running_sample_is_progress_and_silence_is_not(goes_on: bool) -> None:
    """A long answer tells of itself every so many actions; a server that hangs tells nothing."""
    shown: list[str] = []
    generator = SglangGenerator.__new__(SglangGenerator)
    generator._inbox = SimpleNamespace(check_idle=lambda: None)  # type: ignore[assignment]
    generator._context = WorkerContext(role="rollout", progress=lambda: shown.append("progress"))
    generator._ended = []
    generator._unsent = {}
    generator._begun = {"0"}
    generator._running = {"0": SimpleNamespace()}  # type: ignore[dict-item]
    generator._server = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    generator._tokenizer = None
    events = [Event("0", {}, ended=False)] if goes_on else []
    generator._client = SimpleNamespace(wait=lambda wait_s: events)  # type: ignore[assignment]
    generator._finish = lambda ended: ended  # type: ignore[method-assign, assignment, return-value]
    assert generator.step() == []
    assert shown == ["progress"] * goes_on


def test_a_sample_tells_of_itself_often_enough_for_a_slow_engine() -> None:
    """At ten actions a second it does so several times within the default patience."""
    generator = SglangGenerator.__new__(SglangGenerator)
    generator._config = SglangGeneratorConfig()
    generator._ends = []
    request = SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text=""))
    interval = generator._parameters(request, 8)["stream_interval"]
    assert interval / 10 < Deadlines().patience_s / 5


def test_an_adapters_room_is_kept_for_the_models_matrices() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    names += ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    assert lora_arguments(0, names) == {}
    found = lora_arguments(8, names)
    assert found["lora_target_modules"] == ["q_proj", "up_proj"]
    assert found["max_lora_rank"] == 8


def test_a_sample_that_was_cut_has_the_actions_of_both_requests() -> None:
    def answer(ids: list[int], version: str, end: str) -> dict[str, Any]:
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "finish_reason": {"type": end},
        }
        return {"output_ids": ids, "meta_info": meta}

    both = joined(answer([3, 4], "1", "abort"), answer([5], "2", "length"))
    assert both["output_ids"] == [3, 4, 5]
    meta = both["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [3, 4, 5]
    assert [span["version"] for span in meta["weight_versions"]] == ["1", "2"]
    assert action_versions(both, 9).tolist() == [1, 1, 2]
    assert meta["finish_reason"] == {"type": "length"}
    alone = joined(answer([3, 4], "1", "abort"), {})  # it was taken back before it was sent
    assert alone == answer([3, 4], "1", "abort")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [9, 9, 9]),
        ([("4", 0, 3)], [4, 4, 4]),
        ([("4", 0, 1), ("5", 1, 1), ("6", 1, 3)], [4, 6, 6]),
        ([("4", 0, 2), ("5", 2, 7)], [4, 4, 5]),  # an end token behind the answer was cut off
        ([("4", 0, 2)], [4, 4]),  # which is too short, and refused
    ],
    ids=["none", "one", "empty", "longer", "shorter"],
)
def test_spans_say_which_version_sampled_each_action(
    spans: list[tuple[str, int, int]], expected: list[int]
) -> None:
    told = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    answer = {"output_ids": [3, 4, 5], "meta_info": {"weight_versions": told}}
    found = action_versions(answer, 9)
    assert found.dtype == np.int32
    assert found.tolist() == expected
    assert action_versions({"output_ids": []}, 9).tolist() == []


def test_scores_of_other_tokens_than_were_given_are_refused() -> None:
    """SGLang calls the vocabulary's last token 0, which is taken."""
    record = {"prompt_ids": np.array([1, 2]), "action_ids": np.array([5, 21])}
    told = [[None, 2, None], [-1.0, 5, None], [-2.0, 0, None]]
    np.testing.assert_array_equal(
        scored(record, {"meta_info": {"input_token_logprobs": told}}), np.float32([-1, -2])
    )
    told[1][1] = 6
    with pytest.raises(ContractError, match="other tokens"):
        scored(record, {"meta_info": {"input_token_logprobs": told}})
    check_scorable(record, 4)
    with pytest.raises(ContractError, match="a record of 4 tokens is longer than the context of 3"):
        check_scorable(record, 3)


def test_a_record_that_cannot_be_scored_leaves_no_answer_of_another_to_later_steps() -> None:
    generator = SglangGenerator.__new__(SglangGenerator)
    generator._inbox = SimpleNamespace(check_idle=lambda: None)  # type: ignore[assignment]
    generator._context = WorkerContext(role="rollout")
    generator._context_length = 8
    generator._count = 0
    generator._reader = generator._pushed = None
    generator._ended = []
    generator._finish = lambda ended: ended  # type: ignore[method-assign, assignment, return-value]
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 5, None]]}}
    coming = [[Event("000000000001", {}, error="no")], [Event("000000000002", answer)]]
    generator._client = SimpleNamespace(  # type: ignore[assignment]
        sample=lambda bodies: None, wait=lambda wait_s: coming.pop(0)
    )
    one = {"prompt_ids": np.array([1]), "action_ids": np.array([5]), "temperature": np.float32(1)}
    with pytest.raises(WorkerError, match=r"(?s)did not score actions.*no"):
        generator.logprobs([one, one])
    assert coming == []


@pytest.mark.parametrize(("cores", "shares"), [({0, 1, 2}, "0,2|1"), ({5}, "5|5")])
def test_each_process_of_a_split_model_has_cores(
    cores: set[int], shares: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert _cores(2) == shares


def test_a_seeds_hash_is_murmur_hash_3() -> None:
    """Against the algorithm in integers of Python, of words of 32 bits."""
    torch = pytest.importorskip("torch")
    from gcore_sglang.invariant import murmur_hash

    seeds, positions, columns = [0, 7, 2**63 - 1], [0, 11, 4096], [0, 1, 151_935]
    found = murmur_hash(
        torch.tensor(seeds, dtype=torch.int64).to(torch.uint64),
        torch.tensor(positions),
        torch.tensor(columns),
    )
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for place, column in enumerate(columns):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
            assert int(found[row, place]) == murmur_3(data + column.to_bytes(4, "little"))


def murmur_3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole words."""
    hashed = 0
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        hashed ^= word
        hashed = ((hashed << 13 | hashed >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    hashed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> shift) * factor % 2**32
    return hashed ^ hashed >> 16


@pytest.mark.parametrize(
    ("lora", "room", "problem"),
    [
        ({"rank": 8}, 8, ""),
        ({"rank": 8}, 0, ""),
        ({"rank": 16}, 8, "adapters of rank 16"),
        ({"rank": 8, "push": "merged"}, 8, "whole weights"),
        ({}, 8, "whole weights"),
        ({"rank": 0, "path": "", "push": "auto"}, 8, "whole weights"),
        ({"rank": 0, "path": "adapter", "push": "auto"}, 8, ""),
    ],
)
def test_a_job_whose_pushes_sglang_would_refuse_is_refused_at_check(
    lora: dict[str, Any], room: int, problem: str
) -> None:
    roles = {
        "policy": {"use": "torch", "config": {"lora": lora}},
        "rollout": {"use": "sglang", "follows": "policy", "config": {"lora_rank": room}},
    }
    problems = list(gcore_sglang.check_adapter("rollout", roles))
    assert len(problems) == bool(problem)
    assert all(problem in found for found in problems)


def test_limits_and_stops_of_a_request_come_beside_those_of_the_settings() -> None:
    generator = SglangGenerator.__new__(SglangGenerator)
    generator._config = SglangGeneratorConfig(max_new_tokens=12, stop=["a"])
    generator._ends = []
    request = SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text=""))
    turn = dataclasses.replace(request, most=5, stop=("b",))
    told = [generator._parameters(one, 8) for one in (request, turn)]
    assert [parameters["max_new_tokens"] for parameters in told] == [8, 5]
    assert [parameters["stop"] for parameters in told] == [["a"], ["a", "b"]]


def test_adapters_of_pushes_leave_no_stops_to_requests() -> None:
    """SGLang misses a text that a push divides."""
    assert SglangGeneratorConfig().traits().tokens
    assert not SglangGeneratorConfig(lora_rank=8).traits().tokens
