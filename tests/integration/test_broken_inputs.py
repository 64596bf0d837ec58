"""What is broken in a job's files is told by ``g-core check`` with its key, before a run starts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from tests.support.broken_models import BROKEN, FAMILIES, GOOD, make_directory, save_family

G_CORE = Path(sys.executable).with_name("g-core")
COUNT = 20
SEED = 7


def check(folder: Path, models: dict[str, Path]) -> tuple[int, str]:
    """Checks a job with a judge for each model; returns the exit code and the errors.

    One job, so that one helper process looks at all of them.
    """
    judges = {name: {"use": "torch", "model": {"path": str(path)}} for name, path in models.items()}
    rewards = {
        f"by-{name}": {"use": "genrm", "role": name, "config": {"template": "{completion}"}}
        for name in models
    }
    good = str(make_directory("a tiny llama", folder / "good"))
    job = {
        "cluster": {"devices": len(models) + 2},
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl"}},
        "advantage": {"use": "algorithms/grpo"},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": good}},
            "rollout": {"use": "torch"},
            **judges,
        },
        "rewards": rewards,
    }
    (folder / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    environment = {**os.environ, "G_CORE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [G_CORE, "check", file], env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


def test_each_of_twenty_broken_models_is_a_problem_with_its_key_and_no_good_one_is(
    tmp_path: Path,
) -> None:
    kinds = random.Random(SEED).sample(sorted(BROKEN), COUNT)
    made = {family: save_family(tmp_path / f"tiny-{family}", family) for family in FAMILIES}
    models = {
        f"judge{number}": make_directory(kind, tmp_path / f"model{number}", SEED, made.__getitem__)
        for number, kind in enumerate(kinds)
    }
    models |= {
        f"good{number}": make_directory(kind, tmp_path / f"whole{number}", SEED, made.__getitem__)
        for number, kind in enumerate(("a tiny qwen3", "in shards", "in bfloat16"))
    }
    assert set(GOOD) >= {"a tiny qwen3", "in shards", "in bfloat16"}
    code, said = check(tmp_path, models)
    assert code == 2
    assert "Traceback" not in said
    untold = [
        f"{name}: {kinds[int(name.removeprefix('judge'))]}"
        for name in models
        if name.startswith("judge") and f"roles.{name}.model" not in said
    ]
    assert untold == [], said
    assert "roles.good" not in said
    assert "roles.policy" not in said
