"""The real engine against transformers' forward pass, in float32. All tests of this file share
three servers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language import testing
from gcore_language.engine_tests import PushTests
from gcore_language.testing import assert_agree, drain, gaps, run, tensors_of
from gcore_language.tiny import VOCABULARY
from gcore_sglang.stepwise import held
from gcore_testing.contracts.weights import load, push

from gcore_core.contract.errors import DataError, WeightMismatch
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt, WeightPlan

pytestmark = pytest.mark.engine

END = 2
LONG = "1+" * 35 + "1="
PROMPTS = ("1+2=", "7", "12+34=", LONG)


def requests_of(
    prompts: Sequence[str] = PROMPTS, samples: int = 6, *, greedy: bool = False
) -> list[SampleRequest]:
    return testing.requests_of(prompts, samples, greedy=greedy)


def test_the_imported_engine_is_sglang(opened: Any) -> None:
    version = importlib.metadata.version("sglang")
    assert version.startswith("0.5.")
    files = {
        Path(str(file.locate())).resolve() for file in importlib.metadata.files("sglang") or []
    }
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    assert Path(found.origin).resolve() in files
    assert json.loads(opened()._client.call("GET", "/server_info"))["version"] == version


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_p": 0.7, "top_k": 8},
        {"temperature": 0.0},
    ],
)
def test_logp_matches_the_full_softmax_at_the_temperature(
    settings: dict[str, Any], opened: Any, directories: dict[str, Path]
) -> None:
    records = run(opened(**settings), requests_of())
    assert {float(r.columns["temperature"]) for r in records} == {
        np.float32(settings.get("temperature", 1.0) or 1.0)
    }
    assert_agree(gaps(records, directories["llama"]))


def test_greedy_samples_beside_others_have_log_probs_at_temperature_1(
    opened: Any, directories: dict[str, Path]
) -> None:
    generator = opened(temperature=0.7)
    generator.submit(requests_of(samples=2, greedy=True))
    generator.submit([*requests_of(("3+4=", "9"))])
    records = drain(generator, 20)
    greedy = [record for record in records if record.request.greedy]
    assert {float(record.columns["temperature"]) for record in greedy} == {1.0}
    assert_agree(gaps(records, directories["llama"]))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 8}])
def test_ids_without_a_token_are_never_sampled_and_count_in_log_probs(
    settings: dict[str, Any], opened: Any, directories: dict[str, Path]
) -> None:
    """Also where greedy samples run with others, and where all are greedy."""
    generator = opened("padded", **settings)
    greedy = requests_of(samples=1, greedy=True)
    records = run(generator, requests_of(samples=12) + requests_of(("8",), 2, greedy=True))
    records += run(generator, greedy)
    assert max(int(record.columns["action_ids"].max()) for record in records) < VOCABULARY
    assert_agree(gaps(records, directories["padded"]))


def test_an_end_token_is_an_action_and_finishes(opened: Any) -> None:
    records = run(opened(), requests_of(samples=12))
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
    records = run(opened(stop=["12", "+"], context_length=24), requests_of(PROMPTS[:3], samples=12))
    texts = [r.columns["text"].tobytes().decode() for r in records]
    assert {r.reason for r in records} >= {"stop", ""}
    for record, text in zip(records, texts, strict=True):
        assert (record.reason == "stop") == text.endswith(("12", "+"))
        assert "+" not in text[:-1]
    assert_agree(gaps(records, directories["llama"]))


def test_a_prompt_that_fills_the_context_fails_alone(opened: Any) -> None:
    generator = opened(stop=["12", "+"], context_length=24)
    prompts = ("1" * 23, "1" * 20, "1" * 22, "1" * 5000)  # and one token before each
    records = sorted(
        run(generator, requests_of(prompts, 1)), key=lambda record: record.request.ordinal
    )
    full, short, tight, far = records
    for failed, tokens in ((full, 24), (far, 5001)):
        why = f"prompt_too_long: {tokens} tokens, and the context has 24"
        assert (failed.status, failed.reason, dict(failed.columns)) == ("failed", why, {})
    assert short.columns["action_ids"].size <= 3
    assert tight.columns["action_ids"].size == 1


def test_an_image_for_a_text_model_is_refused(opened: Any) -> None:
    shown = Prompt(row=7, text="1+2=", images=["photos/17.png"])
    with pytest.raises(
        DataError,
        match=r"photos/17\.png: row 7 names 1 images, and this generator or its model takes",
    ):
        opened().submit(testing.requests_of([shown]))


def test_samples_of_a_prompt_share_it_in_the_cache(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = opened()
    prompt = "9" + LONG
    run(generator, requests_of((prompt,), 1))
    seen, wait = [], generator._client.wait

    def spy(timeout_s: float) -> Any:
        events = wait(timeout_s)
        seen.extend(event.answer["meta_info"]["cached_tokens"] for event in events if event.ended)
        return events

    monkeypatch.setattr(generator._client, "wait", spy)
    run(generator, requests_of((prompt,), 3))
    assert (
        seen == [len(prompt)] * 3
    )  # all but the last of its tokens, one of which comes before the text


def test_a_sample_that_sglang_refuses_fails_alone(opened: Any) -> None:
    generator = opened()
    requests = requests_of(("1+2=", "7"), 1)
    parameters = generator._parameters
    bad = {"temperature": -1.0}
    generator._parameters = lambda request, room: (
        parameters(request, room) | (bad if request.ordinal else {})
    )
    try:
        records = sorted(run(generator, requests), key=lambda record: record.request.ordinal)
    finally:
        del generator._parameters
    assert [(record.status, record.reason) for record in records][1] == ("failed", "engine_refused")
    assert records[0].status in ("finished", "truncated")


def test_aborted_samples_keep_what_they_have(opened: Any, directories: dict[str, Path]) -> None:
    """Those that have begun their actions, and those that wait none: SGLang is held where both are
    there.
    """
    generator = opened(max_new_tokens=20)
    requests = requests_of((LONG,), 200)  # three times as many as run at once
    with held(generator):
        generator.submit(requests)
        ended = [*generator.step(), *generator.step()]
        keys = {(0, sample) for sample in range(200)} - {(0, r.request.sample) for r in ended}
        aborted = generator.abort([*sorted(keys), (99, 0)])
    assert {(r.request.ordinal, r.request.sample) for r in aborted} == keys
    assert {r.status for r in aborted} == {"aborted"}
    sizes = {r.columns["action_ids"].size for r in aborted}
    assert 0 in sizes and max(sizes) > 0
    assert_agree(gaps([r for r in aborted if r.columns["action_ids"].size], directories["llama"]))
    assert generator.step() == []
    assert generator.abort(sorted(keys)) == []


# -- weights ---------------------------------------------------------------------------------------


class TestPushes(PushTests):
    prompts = PROMPTS

    @pytest.fixture
    def generator(self, opened: Any) -> Iterator[Any]:
        generator = opened()
        yield generator
        assert not (generator._server.private / "bucket").exists()


def test_a_push_without_cache_flush_would_mix_log_probs_of_two_weights(
    opened: Any, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = opened()
    requests = requests_of((LONG,))
    run(generator, requests)  # fills the cache
    with monkeypatch.context() as patched:
        patched.setattr(type(generator), "_forget_cache", lambda self: None)
        push(generator, tensors_of(directories["llama-other"]), generator.version + 1)
        assert gaps(run(generator, requests), directories["llama-other"]).max() > 0.1
    push(generator, tensors_of(directories["llama-other"]), generator.version + 1)
    assert_agree(gaps(run(generator, requests), directories["llama-other"]))
    push(generator, tensors_of(directories["llama"]), generator.version + 1)


def test_a_cache_that_sglang_does_not_flush_stops_the_run(
    opened: Any, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses while samples run: here they were let go on in the middle of the push, and SGLang
    is held there.
    """
    generator = opened(max_new_tokens=20)
    version, tensors = generator.version, tensors_of(directories["llama"])
    plan = WeightPlan(version + 1, [spec for spec, _ in tensors])
    requests = requests_of((LONG,), 60)
    monkeypatch.setattr("gcore_sglang.engine._FLUSH_S", 0.0)  # held, it refuses for ever
    with held(generator):
        generator.begin_weights(plan)
        load(generator, tensors)
        generator.submit(requests)
        generator._send()
        generator._call("/continue_generation", {})
        for event in generator._client.wait(0):  # one has begun
            generator._client._events.put(event)
        with pytest.raises(
            WeightMismatch,
            match=r"(?s)SGLang kept keys and values of the old weights.*Push all tensors",
        ):
            generator.commit_weights(plan)
        assert generator.version == version
        with pytest.raises(WeightMismatch, match="has begun and was not committed"):
            generator.step()
        push(generator, tensors, version + 1)
        generator.abort([(0, sample) for sample in range(60)])
    assert generator.step() == []


def test_samples_running_during_a_push_continue_with_the_new_weights(
    opened: Any, directories: dict[str, Path]
) -> None:
    """Those that have begun do, and those that wait begin with them."""
    generator = opened(max_new_tokens=64)
    requests = requests_of(PROMPTS[:3], 40)  # more than run at once
    old = generator.version
    with held(generator):
        generator.submit(requests)
        before = generator.step()  # something has begun
        push(generator, tensors_of(directories["llama-other"]), old + 1)
    after = drain(generator, len(requests) - len(before))
    both = [record for record in after if record.versions == (old, old + 1)]
    assert both, "no sample ran through the push"
    assert {record.versions for record in after} <= {(old, old), (old, old + 1), (old + 1, old + 1)}
    assert_agree(gaps(both, directories["llama"], slice(0, 1)))
    assert_agree(gaps(both, directories["llama-other"], slice(-1, None)))
    push(generator, tensors_of(directories["llama"]), old + 2)


# -- who may speak to it ---------------------------------------------------------------------------


def test_the_server_refuses_requests_without_its_key(opened: Any) -> None:
    import aiohttp
    from gcore_sglang.client import Client, Refused

    server, ours = opened()._server, opened()._client
    assert server.private.stat().st_mode & 0o777 == 0o700
    assert server.log.stat().st_mode & 0o777 == 0o600
    key = ours._headers[aiohttp.hdrs.AUTHORIZATION].split()[-1]
    assert len(key) >= 32
    process = Path("/proc") / str(server._process.pid)
    for told in ("cmdline", "environ"):
        assert key.encode() not in (process / told).read_bytes()
    assert key not in server.log.read_text()
    stranger = Client(ours._url, "guessed", connections=1)
    try:
        for path in ("/generate", "/update_weights_from_disk", "/pause_generation", "/server_info"):
            with pytest.raises(Refused, match=f"{path} gives 401"):
                stranger.call("GET" if path == "/server_info" else "POST", path, {})
    finally:
        stranger.close()
