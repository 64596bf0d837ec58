"""Runs engines without G-Core, for engine_overhead.py and decode_real.py, each in its own
environment.

    python bare_engines.py ENGINE

It reads one JSON line with what to do, starts the engine and prints {"ready": ...}. Then, for every
line "go", it samples the batch once, by the engine's own loop with log-probs of the sampled tokens,
and prints {"seconds": ..., "cpu_s": ..., "tokens": ...}. For a line with a number it samples as
many actions of each prompt, whatever it is that is drawn; vLLM can.
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


def vllm(job: dict[str, Any]) -> Sample:
    """Starts vLLM and returns a function that samples the batch once."""
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
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=int(0.5 * 2**30),
        max_num_seqs=256,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )

    def sample(round_number: int) -> int:
        parameters = [
            SamplingParams(
                temperature=1.0,
                max_tokens=job["actions"],
                ignore_eos=job.get("ignores_ends", False),
                logprobs=0,
                flat_logprobs=True,  # numbers, not an object for each token
                seed=1000 * round_number + i,
                detokenize=False,
            )
            for i in range(len(job["prompts"]))
        ]
        outputs = llm.generate(job["prompts"], parameters, use_tqdm=False)
        assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in outputs)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return sample


def torch(job: dict[str, Any]) -> Sample:
    """Loads the model with transformers and returns a function that samples the batch once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")

    def sample(round_number: int) -> int:
        torch.manual_seed(round_number)
        encoded = tokenizer(job["prompts"], return_tensors="pt", padding=True)
        start = encoded.input_ids.shape[1]
        with torch.no_grad():
            outputs = model.generate(
                **encoded,
                do_sample=True,
                top_k=0,
                temperature=1.0,
                max_new_tokens=job["actions"],
                return_dict_in_generate=True,
                output_logits=True,
            )
        ids = outputs.sequences[:, start:]
        logp = torch.stack(outputs.logits, 1).log_softmax(-1).gather(2, ids[..., None])
        assert bool(torch.isfinite(logp).all())
        ended = (ids == tokenizer.eos_token_id).cumsum(1)
        return int(((ended == 0) | ((ended == 1) & (ids == tokenizer.eos_token_id))).sum())

    return sample


def sglang(job: dict[str, Any]) -> Sample:
    """Starts SGLang's Engine and returns a function that samples the batch once.

    It has the stand-ins and settings that SGLang needs on a CPU.
    """
    import sglang as engine

    llm = engine.Engine(
        model_path=job["model"],
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        max_total_tokens=16_384,
        log_level="error",
    )

    def sample(round_number: int) -> int:
        parameters = {"temperature": 1.0, "max_new_tokens": job["actions"]}
        outputs = llm.generate(
            job["prompts"], [parameters] * len(job["prompts"]), return_logprob=True
        )
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    return sample


def main(engine: str) -> None:
    """Reads the job, starts the engine and samples once for every further line."""
    job = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not an answer
    sample = {"vllm": vllm, "torch": torch, "sglang": sglang}[engine](job)
    print(json.dumps({"ready": engine}), file=answers, flush=True)
    for round_number, line in enumerate(sys.stdin):
        if line.strip().isdecimal():
            job |= {"actions": int(line), "ignores_ends": True}
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        tokens = sample(round_number)
        took = {
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
        }
        print(json.dumps({**took, "tokens": tokens}), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
