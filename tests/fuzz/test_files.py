"""Files and answers from outside: manifests of checkpoints, weights, a reward service's JSON."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import xxhash
from gcore_language.inbox import WeightInbox
from gcore_language.model_files import open_model_files
from gcore_rewards.config import HttpConfig
from gcore_rewards.service import HttpReward
from gcore_testing.contracts.scorer import scored_record
from hypothesis import strategies as st

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, DataError, WeightMismatch
from gcore_core.contract.launching import Endpoint, Item, Reply, Request, StreamEndpoint
from gcore_core.contract.records import OK, REWARD_FAILED, TensorSpec, WeightPlan
from gcore_core.contract.weight_transfer import Bucket
from gcore_core.run import manifest as manifests
from gcore_core.runtime.compute import DirectCompute
from gcore_core.runtime.messages import PUSH_PLAN, PullWeights, short_reason
from gcore_core.wire.service import decoded, encode
from gcore_core.workers.push import pull_weights

from .drawing import hostile, mutated
from .guarding import fuzz, guarded

pytestmark = pytest.mark.rest

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
#: Depth, digits, what Python's reader takes though JSON has no such number, a lone surrogate.
ODD_JSON = st.sampled_from(
    [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"NaN", b"1e999", b'"\\ud800"', b"", b"\xff"]
)


def test_a_corrupted_manifest_is_never_accepted() -> None:
    def check(raw: bytes) -> None:
        (place / manifests.MANIFEST).write_bytes(raw)
        with guarded(len(raw), beside=2 << 20):
            manifest, problems = manifests.inspect(place)
        assert (manifest is None and len(problems) == 1) or raw == sound

    with tempfile.TemporaryDirectory() as directory:
        key, place = (
            manifests.ensure_key(Path(directory)),
            Path(directory) / "checkpoints" / "step-000003",
        )
        place.mkdir(parents=True)
        manifest = manifests.Manifest(
            run="r",
            step=3,
            saved_unix_s=1.5,
            lock={"gcore-core": "0.1.0"},
            config_hash="0" * 64,
            metrics={"reward": 0.5},
            parts={"policy/state.json": manifests.Part(nbytes=2, sha256="0" * 64)},
        )
        sound = manifests.seal(manifest, key)
        manifests.unseal(sound, key)
        fuzz(mutated(st.just(sound)) | ODD_JSON | JSON.map(json.dumps).map(str.encode), check)


MODEL = {"wte": ("F32", (3, 4)), "norm": ("BF16", (4,))}
SPECS = [
    TensorSpec(n, d, s, int(np.prod(s)) * (4 if d == "F32" else 2)) for n, (d, s) in MODEL.items()
]
WEIGHTS = [np.arange(spec.nbytes, dtype=np.uint8) for spec in SPECS]


class Receiver:
    """Keeps what it is given, after the checks that all generators make."""

    def __init__(self) -> None:
        self._inbox = WeightInbox("rollout", {name: shape for name, (_, shape) in MODEL.items()})
        self.held: dict[str, bytes] = {}
        self.version = 0

    def begin_weights(self, plan: WeightPlan) -> None:
        self._inbox.begin(plan)

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        for spec, array in self._inbox.take(tensors):
            self.held[spec.name] = array.tobytes()

    def commit_weights(self, plan: WeightPlan) -> None:
        self._inbox.complete()
        self.version = plan.version


class Source:
    """A trainer whose messages arrive as these bytes."""

    name = "policy.0"

    def __init__(self, plan: bytes, buckets: list[bytes]) -> None:
        self._plan, self._buckets = plan, iter(buckets)

    async def call(
        self, endpoint: Endpoint[Request, Reply], request: Request, *, deadline_s: float = 60.0
    ) -> Reply:
        raw = self._plan if endpoint.name == PUSH_PLAN.name else next(self._buckets, None)
        if raw is None:
            raise ContractError("no more buckets", where=self.name)
        return decoded(endpoint.reply_decoder, raw, f"reply to {endpoint.name!r}", self.name)

    def stream(
        self, endpoint: StreamEndpoint[Request, Item], request: Request, *, deadline_s: float = 60.0
    ) -> AsyncGenerator[Item, None]:
        raise NotImplementedError

    async def close(self) -> None: ...


def test_a_weight_push_arrives_whole_or_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        memory, empty = Path(directory) / "push", Path(directory) / "empty"
        memory.write_bytes(b"".join(array.tobytes() for array in WEIGHTS) + bytes(64))
        empty.touch()
        digests = [xxhash.xxh3_64_intdigest(array.data) for array in WEIGHTS]
        plan = st.builds(
            lambda v, t: WeightPlan(v, t),
            st.integers(-1, 2),
            st.sampled_from([SPECS, SPECS[:1], []]),
        )
        bucket = st.builds(
            lambda index, path, offset, tensors, told, last: Bucket(
                1, index, path, offset, tensors, told, last
            ),
            st.integers(0, 1),
            st.sampled_from(
                [str(memory)] * 3 + [str(empty), directory, "", "a\0b", "/proc/self/mem"]
            ),
            st.sampled_from([0, 0, 0, 48, -8, 2**40, 2**63 - 1, -(2**63)]),
            st.sampled_from(
                [
                    SPECS,
                    SPECS[:1],
                    SPECS[1:],
                    SPECS[::-1],
                    [],
                    [TensorSpec("wte", "F32", (3, 4), -1)],
                ]
            ),
            st.sampled_from([digests, digests[:1], digests[1:], [], [0, 0]]),
            st.booleans(),
        )
        right = encode(Bucket(1, 0, str(memory), 0, SPECS, digests, True))
        plans = st.just(encode(WeightPlan(1, SPECS))) | hostile(plan.map(encode)) | plan.map(encode)
        buckets = st.lists(
            st.one_of(st.just(right), mutated(st.just(right)), bucket.map(encode)), max_size=4
        )

        async def pull(source: Source, receiver: Receiver) -> None:
            request = PullWeights(1, 0, "policy.0")
            await pull_weights(receiver, source, request, DirectCompute(), lambda: None, {})

        def check(example: tuple[bytes, list[bytes]]) -> None:
            receiver = Receiver()
            with guarded(sum(map(len, example[1])), beside=4 << 20):
                try:
                    runner.run(pull(Source(*example), receiver))
                except (ContractError, WeightMismatch):
                    return
            assert receiver.held == {
                spec.name: array.tobytes() for spec, array in zip(SPECS, WEIGHTS, strict=True)
            }

        runner.run(
            pull(Source(encode(WeightPlan(1, SPECS)), [right]), Receiver())
        )  # makes the decoders
        fuzz(st.tuples(plans, buckets), check)


CONTEXT = WorkerContext(role="policy", rank=0, ranks=1)
CONFIG = json.dumps({"model_type": "llama", "vocab_size": 3}).encode()
HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "wte": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    }
).encode()
INDEX = json.dumps({"weight_map": {"wte": "model.safetensors"}}).encode()


def test_a_model_directory_is_read_or_refused() -> None:
    entries = st.dictionaries(
        st.sampled_from(["wte", "__metadata__"]),
        st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON}) | JSON,
    )
    made = st.dictionaries(st.just("weight_map"), st.dictionaries(st.just("wte"), JSON) | JSON)

    def json_bytes(*drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
        return (
            st.one_of(*(one.map(json.dumps).map(str.encode) for one in (*drawn, JSON))) | ODD_JSON
        )

    headers = (st.just(HEADER) | mutated(st.just(HEADER)) | json_bytes(entries)).flatmap(
        lambda head: st.just(len(head)).map(lambda n: n.to_bytes(8, "little") + head + bytes(48))
    )
    files = st.fixed_dictionaries(
        {
            "config.json": st.just(CONFIG) | mutated(st.just(CONFIG)) | json_bytes(),
            "model.safetensors": headers | mutated(headers),
            "model.safetensors.index.json": st.none() | mutated(st.just(INDEX)) | json_bytes(made),
        }
    )

    def check(example: dict[str, bytes | None]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for name, content in example.items():
                if content is not None:
                    (Path(directory) / name).write_bytes(content)
            size = sum(len(content or b"") for content in example.values())
            with guarded(size, beside=2 << 20):
                try:
                    found = open_model_files(CONTEXT, directory)
                except DataError:
                    return
            assert all(isinstance(size, int) for shape in found.shapes.values() for size in shape)

    fuzz(files, check)


def test_arbitrary_answers_of_a_reward_service_give_scores_or_reasons() -> None:
    records = [scored_record(number, "text", {}) for number in range(2)]
    ids = st.sampled_from([f"{record.ordinal}.{record.sample}" for record in records]) | JSON
    items = st.lists(
        st.fixed_dictionaries({"id": ids}, optional={"score": JSON, "error": JSON}) | JSON,
        max_size=3,
    )
    right = json.dumps(
        {"scores": [{"id": f"{r.ordinal}.{r.sample}", "score": 0.5} for r in records]}
    ).encode()
    deep = b'{"scores": [{"id": "0.0", "error": ' + b"[" * 900 + b"]" * 900 + b"}]}"
    answers = st.one_of(
        st.just(right),
        mutated(st.just(right)),
        st.fixed_dictionaries({"scores": items}).map(json.dumps).map(str.encode),
        JSON.map(json.dumps).map(str.encode),
        ODD_JSON,
        st.just(deep),
    )
    headers = st.dictionaries(
        st.sampled_from(["Retry-After", "Content-Type"]),
        st.sampled_from(["nan", "-1", "1e9", "\x7f"]),
        max_size=2,
    )

    async def asks(answer: bytes, status: int, told: dict[str, str]) -> None:
        reward = HttpReward(HttpConfig(url="http://127.0.0.1:9", retries=0), CONTEXT)
        transport = httpx2.MockTransport(
            lambda _: httpx2.Response(status, content=answer, headers=told)
        )
        reward._client = httpx2.AsyncClient(transport=transport)
        try:
            scores = await reward.score(records)
        finally:
            await reward.close()
        assert len(scores) == len(records)
        for score in scores:
            if score.status == OK:
                assert score.value is not None and np.isfinite(score.value) and status == 200
            else:
                assert score.status == REWARD_FAILED and score.value is None
                encode(short_reason(score.reason))

    with asyncio.Runner() as runner:
        runner.run(asks(right, 200, {}))  # imports what it needs

        def check(example: tuple[bytes, int, dict[str, str]]) -> None:
            with guarded(len(example[0]), beside=8 << 20):
                runner.run(asks(*example))

        fuzz(st.tuples(answers, st.sampled_from([200, 200, 200, 404, 429, 503]), headers), check)
