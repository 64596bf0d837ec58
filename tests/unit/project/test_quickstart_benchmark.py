"""benchmarks/quickstart.py in short: what it compares, and that the other model is another case."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gcore_core.config.plan import load_plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # it imports others that lie beside it
    yield importlib.import_module("quickstart")
    for name in ("quickstart", "quickstart_runs", "uncovered_model", "report"):
        del sys.modules[name]


def trained(bench: ModuleType, cpu_s: float, memory_mib: float) -> object:
    return bench.Trained(samples=100, cpu_s=cpu_s, wall_s=1.0, peak_memory_mib=memory_mib)


def test_ratios_over_trl_are_of_all_rounds_together(bench: ModuleType) -> None:
    pairs = [
        (trained(bench, cpu_s, 90.0 + cpu_s), trained(bench, 3 * cpu_s, 60.0))
        for cpu_s in (1.0, 2.0, 3.0)
    ]
    claims = {claim.name: claim for claim in bench.pair_claims("other", pairs, 1.0)}
    ratio = claims["samples_per_cpu_second_over_trl_other"]
    assert ratio.value == pytest.approx(3)
    assert ratio.interval == pytest.approx((3, 3))
    assert claims["samples_per_cpu_second_other"].value == pytest.approx(300 / 6)
    assert bench.memory_over_trl(pairs) == pytest.approx(93 / 60)


def test_same_forwards_is_one_update_a_step_on_both_sides(bench: ModuleType) -> None:
    plan = load_plan(bench.RECIPE, [*bench.SAME_FORWARDS]).config
    settings = bench.trl_settings(plan)
    assert plan["controller"]["config"]["minibatches"] == settings["minibatches"] == 1
    assert plan["controller"]["config"]["epochs"] == 1


def test_the_other_model_is_not_covered_by_the_path_for_short_records(
    bench: ModuleType, tmp_path: Path
) -> None:
    flat = pytest.importorskip("gcore_language.flat")
    packing = pytest.importorskip("gcore_language.packing")
    transformers = pytest.importorskip("transformers")
    other = bench.uncovered_model
    messages: list[str] = []
    other.make(tmp_path, {"seed": 0}, lambda share, text: messages.append(text))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "gpt_neox"
    assert not flat.family_supported(config)
    assert messages
    rows = tmp_path / "rows.jsonl"
    other.write_rows(rows, 32)
    prompts = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    lengths = {len(prompt) for prompt in prompts}
    assert len(lengths) > 10  # prompts of one length would suit one side
    assert max(lengths) + 1 + other.MAX_NEW_TOKENS <= 1024
    assert min(lengths) > packing.FLAT_ROW_TOKENS


def test_the_settings_for_the_other_model_are_those_that_trl_gets(
    bench: ModuleType, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    bench.uncovered_model.write_rows(data, 8)
    plan = load_plan(bench.RECIPE, [*bench.UNCOVERED, f"data.config.path={data}"]).config
    settings = bench.trl_settings(plan)
    assert settings["reward"] == "digit_share"
    assert settings["data"] == str(data)
    assert settings["max_new_tokens"] == bench.uncovered_model.MAX_NEW_TOKENS
    assert bench.uncovered_model.digit_share_of("12ab") == 0.5


def test_memory_counts_a_process_and_what_it_has_started(bench: ModuleType) -> None:
    child = "data = bytearray(64 << 20); print('ready', flush=True); input()"
    parent = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE); "
        "input(); p.communicate(b'\\n')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    root = bench.psutil.Process(process.pid)
    assert bench.tree_mib(root) > 64
    process.communicate(b"\n")
    assert bench.tree_mib(root) == 0  # a process that has ended counts nothing
