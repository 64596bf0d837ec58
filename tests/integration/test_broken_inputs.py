"""What is broken in a job's files is told by ``g-core check`` with its key, before a run starts."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")

from tests.support import broken_rows, broken_tokenizers
from tests.support.broken_models import BROKEN, FAMILIES, GOOD, make_directory, save_family

G_CORE = Path(sys.executable).with_name("g-core")
COUNT = 20
SEED = 7
#: Kinds of broken rows that are checked each time; the others are slow.
FEW = random.Random(SEED).sample(sorted(broken_rows.BROKEN), 8)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    directory = save_family(tmp_path_factory.mktemp("whole"), "llama")
    (directory / broken_tokenizers.TEMPLATE).write_text(TEMPLATE)
    return directory


def check(
    folder: Path, model: Path, data: dict[str, Any], judges: Mapping[str, Path]
) -> tuple[int, str]:
    """Checks a job; returns the exit code and the errors.

    judges: name of a role -> its model. They are in one job, so one helper process looks at all.
    """
    (folder / "one.py").write_text("def one(record):\n    return 1.0\n")
    one = {"use": "core/function", "config": {"path": "one.py", "name": "one"}}
    asked = {
        f"by-{name}": {"use": "genrm", "role": name, "config": {"template": "{completion}"}}
        for name in judges
    }
    job = {
        "cluster": {"devices": len(judges) + 2},
        "data": {"use": "core/jsonl", "config": data},
        "advantage": {"use": "algorithms/grpo"},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": str(model)}},
            "rollout": {"use": "torch"},
            **{
                name: {"use": "torch", "model": {"path": str(path)}}
                for name, path in judges.items()
            },
        },
        "rewards": {"one": one, **asked},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    # What was said of the whole model is kept for all tests of this file.
    environment = {**os.environ, "G_CORE_CACHE": str(model / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [G_CORE, "check", file], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def of_judge(said: str, name: str) -> str:
    """Returns what is said of a judge, in one line."""
    keys = rf" *(roles\.{name}\.model|rewards\.by-{name}\.)"
    return " ".join(line for line in said.splitlines() if re.match(keys, line))


def test_each_of_twenty_broken_models_is_a_problem_with_its_key_and_no_good_one_is(
    whole: Path, tmp_path: Path
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
    data = broken_rows.write_rows(tmp_path / "rows.jsonl", [broken_rows.TEXT], chat=False)
    code, said = check(tmp_path, whole, data, models)
    assert code == 2
    untold = [
        f"{name}: {kinds[int(name.removeprefix('judge'))]}"
        for name in models
        if name.startswith("judge") and f"roles.{name}.model" not in said
    ]
    assert untold == [], said
    assert "roles.good" not in said
    assert "roles.policy" not in said


def test_each_broken_tokenizer_is_a_problem_with_its_key_and_a_whole_one_is_not(
    whole: Path, tmp_path: Path
) -> None:
    models = {f"judge{n}": tmp_path / f"model{n}" for n in range(len(broken_tokenizers.BROKEN))}
    for model, (name, broken) in zip(
        models.values(), broken_tokenizers.BROKEN.items(), strict=True
    ):
        shutil.copytree(whole, model, ignore=shutil.ignore_patterns("cache"))
        broken.break_it(model, random.Random(name))
    data = broken_rows.write_rows(tmp_path / "rows.jsonl", [broken_rows.TEXT], chat=False)
    code, said = check(tmp_path, whole, data, {**models, "good": whole})
    assert code == 2
    untold = [
        f"{judge}: {name}: {of_judge(said, judge)}"
        for judge, (name, broken) in zip(models, broken_tokenizers.BROKEN.items(), strict=True)
        if not re.search(broken.says, of_judge(said, judge))
    ]
    assert untold == [], said
    assert of_judge(said, "good") == ""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.slow)
        for name in broken_rows.BROKEN
    ],
)
def test_a_broken_row_is_a_problem_with_its_key_and_its_number(
    whole: Path, tmp_path: Path, name: str
) -> None:
    broken = broken_rows.BROKEN[name]
    file = tmp_path / "rows.jsonl"
    data, number = broken.write(file, random.Random(name))
    code, said = check(tmp_path, whole, data, {})
    assert code in (2, 4), said
    assert "data.config" in said
    assert re.search(broken.says, " ".join(said.split())), said
    assert re.search(rf"\brow {number}\b|\bline {number + 1}\b", said), said
