"""Runs one step on verl's old path: its single controller, which carries the payload itself.

verl 0.9.1 calls this path deprecated; its default is that of verl_transferqueue.py. The payload is
collected from workers, then dispatched to a reward and to training.

    VERL_PYTHON benchmarks/verl_controller.py NBYTES RECORDS ROUNDS

Prints one JSON object. Runs in an environment of verl's own (``tox run -e bench-verl``), started by
verl_rival.py once for each size, so that the peak memory of the driver belongs to that size.
VERL_DATAPROTO_SERIALIZATION_METHOD=numpy chooses verl's other serialisation.

Four workers make RECORDS float32 tensors of NBYTES in all, go over every byte of what they are
sent and check its hash; nothing else is computed. The driver does what verl's trainer does:
generation, union, reward, union, select, update.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import statistics
import sys
import tempfile
import time

WORKERS = 4
os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would leave one in the home directory

import ray  # noqa: E402
import torch  # noqa: E402
import xxhash  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402


@ray.remote
class Device(Worker):
    """A worker of verl that makes payload and reads it.

    digest: the hash of each payload that it is sent.
    """

    def __init__(self, digest: int) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._digest = digest

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto) -> DataProto:
        """Returns a payload of ones, float32[prompts, numbers]."""
        numbers = int(prompts.batch["numbers"][0])
        return DataProto.from_dict(tensors={"payload": torch.ones(len(prompts), numbers)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def look(self, data: DataProto) -> DataProto:
        """Returns a score of each record, which is the sum of every 4,096th number of it.

        Raises ValueError where a payload is not what was made.
        """
        for payload in data.batch["payload"].unbind():
            if xxhash.xxh3_64_intdigest(payload.numpy()) != self._digest:
                raise ValueError("a payload is not what was made")
        return DataProto.from_dict(tensors={"scores": data.batch["payload"][:, ::4096].sum(1)})


def step(workers: RayWorkerGroup, nbytes: int, records: int) -> float:
    """Returns the seconds of one step.

    nbytes: bytes of all payload of the step.
    records: number of records.
    """
    numbers = torch.full((records,), nbytes // records // 4)
    prompts = DataProto.from_dict(
        tensors={"ids": torch.zeros(records, 16, dtype=torch.long), "numbers": numbers}
    )
    began_s = time.perf_counter()
    batch = prompts.union(workers.generate(prompts))
    batch = batch.union(workers.look(batch))
    updated = workers.look(batch.select(batch_keys=["payload"]))
    seconds = time.perf_counter() - began_s
    if len(updated) != records:
        raise SystemExit(f"{len(updated)} records came back of {records}")
    return seconds


def main() -> None:
    nbytes, records, rounds = (int(word) for word in sys.argv[1:4])
    payload = torch.ones(nbytes // records // 4).numpy()
    digest = xxhash.xxh3_64_intdigest(payload)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=WORKERS + 1,
            object_store_memory=max(int(3.5 * nbytes), 1 << 29),
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        # verl reserves 10 CPUs for each worker by default, and waits for them without a word
        pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
        workers = RayWorkerGroup(pool, RayClassWithInitArgs(cls=Device, digest=digest))
        seconds = [step(workers, nbytes, records) for _ in range(rounds + 1)][1:]
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = {"step_s": statistics.median(seconds), "memory_mib": peak_kib / 1024}
        ray.shutdown()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
