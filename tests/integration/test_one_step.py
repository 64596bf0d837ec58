"""contrib/gcore-one-step, a step program outside the core: it holds its contract, runs with fakes,
refuses what it cannot do, and learns the quickstart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from gcore_core.testing.installed import InstalledPlugins
from tests.integration.test_sentinel_runs import late
from tests.support import runs

REPOSITORY = Path(__file__).parents[2]
HERE = REPOSITORY / "contrib" / "gcore-one-step"
RECIPES = REPOSITORY / "recipes"
#: What a plugin's author may import.
PUBLIC = re.compile(r"gcore_core|gcore_core\.(contract|controllers)(\.\w+)*|gcore_one_step(\.\w+)*")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """As pip would have installed it, by its metadata alone."""
    site = InstalledPlugins(tmp_path / "site")
    site.add("one-step")
    (site.directory / "gcore_one_step.py").unlink()
    path = os.pathsep.join((str(site.directory), str(HERE), str(REPOSITORY)))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **more}


def g_core(
    directory: Path, environment: dict[str, str], *words: str, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gcore_core", *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def write_fakes(directory: Path, objective: str) -> None:
    job = runs.job(controller={"use": "one-step", "shards": 2, "config": {"prompts": 4}})
    job |= {"objective": {"use": objective}, "local": [str(runs.FAKE), "trouble.py"]}
    (directory / "trouble.py").write_text(runs.TROUBLE)
    (directory / "job.yaml").write_text(json.dumps(job))


def test_the_program_is_short_and_imports_only_public_modules() -> None:
    files = sorted((HERE / "gcore_one_step").glob("*.py"))
    text = "".join(file.read_text() for file in files)
    assert len(text.splitlines()) < 150
    imported = set(re.findall(r"^ *(?:from|import) (gcore\w*(?:\.\w+)*)", text, re.MULTILINE))
    assert imported and [name for name in imported if not PUBLIC.fullmatch(name)] == []


def test_the_program_passes_the_contract_of_step_programs(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        + ["-c", os.devnull, "--rootdir", str(HERE)],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_program_trains_on_records_one_version_old(
    environment: dict[str, str], tmp_path: Path
) -> None:
    write_fakes(tmp_path, "algorithms/ppo_clip")
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as sockets:
        words = ["run", "job.yaml", "run.steps=4", f"launcher.config.socket_dir={sockets}"]
        done = g_core(tmp_path, environment, *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (metrics,) = tmp_path.glob("runs/*/001/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4]
    batches = [json.loads(line) for line in (tmp_path / "batches.jsonl").read_text().splitlines()]
    ordinals = [sorted({ordinal for ordinal, _ in batch}) for batch in batches]
    assert ordinals == [list(range(4 * step, 4 * step + 4)) for step in range(4)]


def run_late(
    environment: dict[str, str], directory: Path, fault: str, **sections: object
) -> subprocess.CompletedProcess[str]:
    """Runs fakes one step ahead; replica 1 has a fault from version 3 on."""
    job = late(directory, fault, objective={"use": "algorithms/ppo_clip"}, **sections)
    job["controller"] = {**job["controller"], "use": "one-step"}
    (directory / "trouble.py").write_text(runs.TROUBLE)
    (directory / "job.yaml").write_text(json.dumps(job))
    return g_core(directory, environment, "run", "job.yaml")


@pytest.mark.parametrize("shards", [1, 2])
def test_both_sides_score_canaries_after_each_push(
    environment: dict[str, str], tmp_path: Path, shards: int
) -> None:
    """The records are a version old, so that none of them can be compared itself."""
    controller = {"shards": shards}
    done = run_late(environment, tmp_path / "watched", "unpushed", controller=controller)
    output = done.stdout + done.stderr
    assert done.returncode == 6, output[-3000:]
    assert "step 3: rollout.1 and the trainer disagree about log-probs since step 3" in output
    assert "cause: rollout.1 holds weights of version 2 in 2 of 2 tensors: old weights" in output
    # Its own save had not begun, and that of the step before is whole.
    saved = sorted(path.name for path in (tmp_path / "watched").glob("runs/*/001/checkpoints/s*"))
    assert saved[-1:] == ["step-000002"], saved
    blind = {"controller": controller, "sentinel": {"canaries": 0}}
    done = run_late(environment, tmp_path / "blind", "unpushed", **blind)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_canaries_of_a_healthy_run_give_no_alarm(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_late(environment, tmp_path, "none")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (metrics,) = tmp_path.glob("runs/*/001/metrics.jsonl")
    rows = [json.loads(line)["metrics"] for line in metrics.read_text().splitlines()]
    seen = [row.get("sentinel/canary_actions", 0) for row in rows[1:]]
    assert seen[0] == 0 and min(seen[1:]) > 0, seen  # the first step's records are fresh


@pytest.mark.parametrize(
    ("objective", "override", "problem"),
    [
        (
            "fake",
            "run.steps=1",
            "objective: fake does not correct for actions that older weights sampled, and "
            "controller one-step trains on such actions; choose an objective, or settings of "
            "it, with which the loss corrects for them.",
        ),
        (
            "algorithms/ppo_clip",
            "placement.sleep_in_training=always",
            "placement.sleep_in_training: one-step generates while it trains, so generators cannot "
            "sleep; set it to never.",
        ),
    ],
)
def test_check_refuses_jobs_that_the_program_cannot_run(
    objective: str, override: str, problem: str, environment: dict[str, str], tmp_path: Path
) -> None:
    write_fakes(tmp_path, objective)
    done = g_core(tmp_path, environment, "check", "job.yaml", override)
    assert done.returncode != 0
    assert problem in " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_the_program_learns_the_quickstart(environment: dict[str, str], tmp_path: Path) -> None:
    """As many steps as core/sync takes; most held-out problems are solved in the end."""
    pytest.importorskip("gcore_torch")
    job = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    job["run"]["dir"] = str(tmp_path / "run")
    job["controller"]["use"] = "one-step"
    del job["plugins"]
    text = yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
    (tmp_path / "job.yaml").write_text(text)
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as sockets:
        words = ["run", "job.yaml", f"launcher.config.socket_dir={sockets}"]
        done = g_core(tmp_path, environment, *words, timeout_s=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(row)["evaluation"] for row in rows]
    last = [found for found in evaluations if found][-1]
    assert last["greedy/exact"] >= 0.9, last
