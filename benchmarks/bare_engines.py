"""Runs engines without G-Core, for engine_overhead.py, each in its own environment.

    python bare_engines.py ENGINE

It reads one JSON line with what to do, starts the engine and prints {"ready": ...}. Then, for every
line "go", it samples the batch once, by the engine's own loop with log-probs of the sampled tokens,
and prints {"seconds": ..., "tokens": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Sample = Callable[[int], int]  # round -> tokens sampled

if (
    os.environ.get("BARE_ENGINE") == "sglang"
):  # SGLang's own processes import this module again before anything else
    from gcore_sglang.cpu import stand_in

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    stand_in()


def vllm(told: dict[str, Any]) -> Sample:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(
        model=told["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=int(0.5 * 2**30),
        max_num_seqs=256,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )

    def sample(turn: int) -> int:
        parameters = [
            SamplingParams(
                temperature=1.0,
                max_tokens=told["actions"],
                logprobs=0,
                flat_logprobs=True,  # numbers, not an object for each token
                seed=1000 * turn + i,
                detokenize=False,
            )
            for i in range(len(told["prompts"]))
        ]
        found = llm.generate(told["prompts"], parameters, use_tqdm=False)
        assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in found)
        return sum(len(output.outputs[0].token_ids) for output in found)

    return sample


def torch(told: dict[str, Any]) -> Sample:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(told["model"], padding_side="left")

    def sample(turn: int) -> int:
        torch.manual_seed(turn)
        encoded = tokenizer(told["prompts"], return_tensors="pt", padding=True)
        start = encoded.input_ids.shape[1]
        with torch.no_grad():
            found = model.generate(
                **encoded,
                do_sample=True,
                top_k=0,
                temperature=1.0,
                max_new_tokens=told["actions"],
                return_dict_in_generate=True,
                output_logits=True,
            )
        ids = found.sequences[:, start:]
        logp = torch.stack(found.logits, 1).log_softmax(-1).gather(2, ids[..., None])
        assert bool(torch.isfinite(logp).all())
        ended = (ids == tokenizer.eos_token_id).cumsum(1)
        return int(((ended == 0) | ((ended == 1) & (ids == tokenizer.eos_token_id))).sum())

    return sample


def sglang(told: dict[str, Any]) -> Sample:
    """SGLang's Engine in this process, with the stand-ins and settings that it needs on a CPU."""
    import sglang as engine

    made = engine.Engine(
        model_path=told["model"],
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        max_total_tokens=16_384,
        log_level="error",
    )

    def sample(turn: int) -> int:
        parameters = {"temperature": 1.0, "max_new_tokens": told["actions"]}
        found = made.generate(
            told["prompts"], [parameters] * len(told["prompts"]), return_logprob=True
        )
        return sum(output["meta_info"]["completion_tokens"] for output in found)

    return sample


def main(engine: str) -> None:
    told = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not an answer
    sample = {"vllm": vllm, "torch": torch, "sglang": sglang}[engine](told)
    print(json.dumps({"ready": engine}), file=answers, flush=True)
    for turn, _ in enumerate(sys.stdin):
        began_s = time.perf_counter()
        tokens = sample(turn)
        print(
            json.dumps({"seconds": time.perf_counter() - began_s, "tokens": tokens}),
            file=answers,
            flush=True,
        )
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
