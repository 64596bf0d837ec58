"""Runs one step on the path that verl takes by default: its V1 trainer's, through TransferQueue.

The controlling process sees keys only. Producers put payload into TransferQueue's storage; workers
of verl fetch it from there, open it and check its hash.

    VERL_PYTHON benchmarks/verl_transferqueue.py NBYTES RECORDS STEPS default|tuned

Prints one JSON object. Runs in an environment of verl's own (``tox run -e bench-verl``), started by
verl_rival.py.

What is verl's and TransferQueue's own here: the settings (verl's transfer_queue.yaml), the
storage and its wire format (SimpleStorage over ZeroMQ, which copies no tensor to encode it), the
calls that V1 makes (``kv_batch_put`` of nested TensorDicts for each answer, ``kv_list`` for the
keys of a batch, ``kv_clear``), and a worker group that a KVBatchMeta is dispatched to, whose
workers fetch their part of it before the method is called. What V1 needs a GPU for is replaced:
inference servers by payload that lies ready, and models by a look at every byte. The reward is
given the better of two ways: a worker group of its own fetches the payload in parts. V1's own
reward model is called with what the controlling process has fetched.

default: verl's settings; each answer is put by a call of its own, as V1's agent loops do.
tuned: what measured best on two cores: four storage units, one thread for each client and unit,
one dense put for all answers of a producer, and readers that ask for the fields they read.

Producers and readers make no payload inside the step: each record is a view of the same noise,
at a place of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import statistics
import sys
import tempfile
import time
from importlib.resources import files
from typing import Any

WORKERS = 4  # producers, and workers of reward and of training
WARM = 2  # steps that are not counted: the first connects, the second fills caches of memory
SHIFTS = 1 << 16  # places at which a record's payload may begin
PARTITION = "train"
TUNED_UNITS = 4
TUNED_THREADS = {"TQ_NUM_THREADS": "1", "TQ_CLIENT_ZMQ_IO_THREADS": "1"}
TUNED = sys.argv[-1] == "tuned"

os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"TRANSFER_QUEUE_ENABLE": "1", **(TUNED_THREADS if TUNED else {})}
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would leave one in the home directory

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
import transfer_queue  # noqa: E402
import xxhash  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import (  # noqa: E402
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.utils import tensordict_utils  # noqa: E402


def digest_of(payload: torch.Tensor) -> int:
    """Returns a payload's hash as a number that an int64 tensor holds."""
    return xxhash.xxh3_64_intdigest(payload.numpy()) >> 1


@ray.remote
class Producer:
    """Stands for one of V1's agent loops, which put what inference servers answer.

    nbytes: bytes of one record's payload.
    records: records that it puts in a step.
    dense: whether it puts all of them with one call.
    """

    def __init__(self, nbytes: int, records: int, dense: bool) -> None:
        torch.set_num_threads(1)
        transfer_queue.init()  # attaches to the one that the controlling process has made
        noise = torch.from_numpy(
            np.random.default_rng(0).integers(0, 256, nbytes + SHIFTS, dtype=np.uint8)
        )
        places = np.random.default_rng(os.getpid()).integers(0, SHIFTS, records)
        payloads = [noise[place : place + nbytes] for place in places]
        digests = [torch.tensor([digest_of(payload)]) for payload in payloads]
        self._fields = [
            {"payload": payload, "digest": digest}
            for payload, digest in zip(payloads, digests, strict=True)
        ]
        self._all = tensordict_utils.list_of_dict_to_tensordict(self._fields) if dense else None

    async def generate(self, keys: list[str]) -> None:
        """Puts one step's records under ``keys``."""
        if self._all is not None:
            await self._put(keys, self._all)
            return
        await asyncio.gather(
            *(
                self._put([key], tensordict_utils.list_of_dict_to_tensordict([fields]))
                for key, fields in zip(keys, self._fields, strict=True)
            )
        )

    async def _put(self, keys: list[str], fields: TensorDict) -> None:
        """Puts records with the tags that V1 chooses batches by."""
        tags = [{"status": "success", "seq_len": 16, "global_steps": 0} for _ in keys]
        await transfer_queue.async_kv_batch_put(
            keys=keys, fields=fields, tags=tags, partition_id=PARTITION
        )


@ray.remote
class Reader(Worker):
    """A worker of verl. Its dispatcher has fetched the payload when a method is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def score(self, data: TensorDict) -> TensorDict:
        """Returns a score of each record, which goes to TransferQueue."""
        read(data)
        return TensorDict({"rm_scores": torch.ones(len(data), 1)}, batch_size=len(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update(self, data: TensorDict) -> TensorDict:
        """Returns metrics, which go to the controlling process."""
        read(data)
        return tensordict_utils.get_tensordict({}, {"metrics": {"records": len(data)}})


def read(data: TensorDict) -> None:
    """Goes over every byte and raises ValueError where a payload is not what was put."""
    for payload, digest in zip(data["payload"].unbind(), data["digest"].unbind(), strict=True):
        if digest_of(payload) != int(digest):
            raise ValueError("a payload is not what was put")


def step(producers: list[Any], workers: RayWorkerGroup, keys: list[str]) -> float:
    """Returns the seconds of one step, which the controlling process runs as V1's trainer does."""
    began_s = time.perf_counter()
    parts = [keys[i :: len(producers)] for i in range(len(producers))]
    ray.get([p.generate.remote(part) for p, part in zip(producers, parts, strict=True)])
    tags = transfer_queue.kv_list(PARTITION)[PARTITION]
    if len(tags) != len(keys):
        raise SystemExit(f"{len(tags)} records are there of {len(keys)}")
    scored = workers.score(batch_of(tags))
    workers.update(batch_of(tags))
    transfer_queue.kv_clear(keys=list(tags), partition_id=PARTITION)
    seconds = time.perf_counter() - began_s
    if len(scored) != len(keys):
        raise SystemExit(f"{len(scored)} records were scored of {len(keys)}")
    return seconds


def batch_of(tags: dict[str, dict[str, Any]]) -> KVBatchMeta:
    """Returns a batch's keys and tags; without names of fields a worker fetches all there are."""
    return KVBatchMeta(
        keys=list(tags),
        tags=list(tags.values()),
        partition_id=PARTITION,
        fields=["payload", "digest"] if TUNED else None,
        extra_info={},
    )


def settings() -> Any:
    """Returns verl's settings of TransferQueue, with the number of units that is tuned."""
    path = files("verl") / "trainer/config/transfer_queue/transfer_queue.yaml"
    values = OmegaConf.load(str(path))
    values.enable = True
    if TUNED:
        values.backend.SimpleStorage.num_data_storage_units = TUNED_UNITS
    return values


def main() -> None:
    nbytes, records, steps = (int(word) for word in sys.argv[1:4])
    if sys.argv[4] not in ("default", "tuned"):
        raise SystemExit(f"default or tuned, not {sys.argv[4]!r}")
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=32,  # of Ray's counting; an actor that finds none waits without a word
            object_store_memory=1 << 29,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        transfer_queue.init(settings())
        size = nbytes // records
        producers = [Producer.remote(size, records // WORKERS, TUNED) for _ in range(WORKERS)]
        pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
        workers = RayWorkerGroup(pool, RayClassWithInitArgs(cls=Reader))
        seconds = [
            step(producers, workers, [f"{number}_{record}_0" for record in range(records)])
            for number in range(WARM + steps)
        ][WARM:]
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        transfer_queue.close()
        ray.shutdown()
    print(json.dumps({"step_s": statistics.median(seconds), "memory_mib": peak_kib / 1024}))


if __name__ == "__main__":
    main()
