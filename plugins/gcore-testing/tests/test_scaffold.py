"""What ``g-core plugins new`` writes fails its contract until the marked lines are filled in, and
passes it then.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core.config import scaffold

REPOSITORY = Path(__file__).parents[2]

#: A marked line: the comment, and the statement that stands for what is to be written.
MARKED = re.compile(r"^( *)# FILL IN: .*\n\1raise NotImplementedError.*\n", re.MULTILINE)

#: kind -> what an author would write at its marks, in the order of files and lines.
ANSWERS = {
    "balancer": [
        """
        found: list[list[int]] = [[] for _ in range(bins)]
        sums = [0.0] * bins
        for index in np.argsort(-costs, kind="stable"):
            least = min(range(bins), key=lambda bin: (sums[bin], len(found[bin])))
            found[least].append(int(index))
            sums[least] += float(costs[index])
        return found
        """
    ],
    "annotator": [
        """
        lengths = [record.columns["action_ids"].size for record in records]
        zeros = [np.zeros(length, np.float32) for length in lengths]
        return [dict.fromkeys(self._context.columns, column) for column in zeros]
        """
    ],
    "role": [
        """
        zeros = [np.zeros(record.columns["action_ids"].size, np.float32) for record in records]
        return [dict.fromkeys(self._columns, column) for column in zeros]
        """
    ],
    "controller": [
        """
        trained = await self.train(step, taken, watch)
        return await self.end(step, taken, trained, watch)
        """
    ],
    "reward": ["return Score(value=self._config.scale * record.text.count('3'))"],
    "sampler": [
        "return [int(group.rewards.argmax())] * count",
        """
        request = f" Improve this answer: {draft.text}"
        if prompt.text is not None:
            return Prompt(row=prompt.row, text=prompt.text + request, images=prompt.images)
        turns = [*(prompt.messages or []), {"role": "user", "content": request}]
        return Prompt(row=prompt.row, messages=turns, images=prompt.images)
        """,
    ],
    "placement": [
        """
        cells = {role: tuple(Cell((device,)) for device in devices[:slots]) for role, slots in window.slots.items()}
        return Decision(partition=partition or Partition(cells))
        """  # noqa: E501
    ],
    "advantage": ["return rewards - rewards.mean() if np.ptp(rewards) else np.zeros(len(rewards))"],
    "objective": [
        """
        clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
        return -torch.minimum(ratio * advantage, clipped * advantage)
        """
    ],
    "hooks": [
        "with file.open('a') as lines:\n    lines.write(f'{report.step} {report.metrics}\\n')"
    ],
    "observer": [
        """
        with self._file.open("a") as lines:
            lines.write(f"{report.step} {report.metrics}\\n")
        """
    ],
    "view": ['return Picture(f\'<p>{rows[-1]["metrics"]["reward"]}</p>\')'],
    "dataset": ["return Prompt(row=row, text=f'{row} + 1 =', fields={'answer': row + 1})"],
    "filter": [
        """
        return (True, "") if spread > self._least else (False, "too_equal")
        """
    ],
    "sentinel": [
        """
        gaps = [np.abs(r.rollout_logp - r.trainer_logp)[r.mask] for r in records]
        over = [np.count_nonzero(~(gap <= self._band)) for gap in gaps]
        return np.array(over, np.float64).reshape(-1, 1)
        """,
        """
        return [
            Alarm(replica=replica, since_step=step, actions=int(over), text="they disagree")
            for (replica, _), (over,) in sorted(evidence.items())
            if over > self._allowed
        ]
        """,
    ],
    "command": ["print((directory / 'metrics.jsonl').read_text())\nreturn 0"],
    "launcher": [
        "return await self._local.nodes(devices)",
        "return self._local.site(where, supervisor, logs)",
    ],
    "generator": [
        """
        from gcore_testing import fake
        limit = fake.FakeGeneratorConfig(max_new_tokens=8)
        self._engine = fake.FakeGenerator(limit, context)
        """,
        "self._engine.submit(requests)",
        "return self._engine.step()",
        "self._engine.begin_weights(plan)",
        "self._engine.load_weights(tensors)",
        "self._engine.commit_weights(plan)",
        """
        from gcore_testing import fake
        from gcore_testing.safetensors_files import write_safetensors
        write_safetensors(tmp_path / "model.safetensors", fake.tensors_of(fake.initial_logits(0)))
        return {"path": str(tmp_path)}
        """,
    ],
    "trainer": [
        """
        from gcore_testing import fake
        self._engine = fake.FakeTrainer(fake.FakeTrainerConfig(learning_rate=5.0), context)
        """,
        "return self._engine.prepare(records, scalars)",
        "return self._engine.train(step, advantages, minibatches, epochs)",
        "return self._engine.weight_specs()",
        "yield from self._engine.export_weights()",
        "self._engine.save(directory)",
        "self._engine.load(directory)\nself.version = self._engine.version",
        "self._engine.save_pretrained(directory)",
        "return {}",
    ],
}

#: What an author would write at a generator's marks whose engine is torch.
WITH_TORCH = [
    """
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator
    limit = TorchGeneratorConfig(max_new_tokens=config.max_new_tokens)
    self._engine = TorchGenerator(limit, context)
    """,
    *ANSWERS["generator"][1:-1],
    """
    from gcore_language.tiny import save_model
    save_model(tmp_path, "llama")
    return {"path": str(tmp_path)}
    """,
]


def fill_in(directory: Path, answers: list[str]) -> None:
    """Writes the answers where the marks are."""
    left = iter(answers)

    def answer(match: re.Match[str]) -> str:
        return textwrap.indent(textwrap.dedent(next(left)).strip("\n") + "\n", match[1])

    for file in sorted(directory.rglob("*.py")):
        file.write_text(MARKED.sub(answer, file.read_text()))
    assert next(left, None) is None, "there are more answers than marks"


@pytest.fixture
def written(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, dict[str, str]]]:
    """A new plugin, installed by its metadata alone: (directory, environment)."""
    directory = scaffold.write("scaffolded", request.param, tmp_path / "gcore-scaffolded").directory
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    site = InstalledPlugins(tmp_path / "site")
    site.add("scaffolded", wheel=Wheel(requires=project["dependencies"]))
    (site.directory / "gcore_scaffolded.py").unlink()
    path = os.pathsep.join((str(site.directory), str(directory), str(REPOSITORY)))
    yield (
        directory,
        {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    )


def run_tests(
    directory: Path, environment: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("written", sorted(ANSWERS), indirect=True)
def test_a_new_plugin_fails_its_contract_until_it_is_filled_in(
    written: tuple[Path, dict[str, str]], request: pytest.FixtureRequest
) -> None:
    directory, environment = written
    before = run_tests(directory, environment, "-x", "-k", "not TestPlugin")
    assert before.returncode == 1 and "NotImplementedError" in before.stdout, before.stdout
    checked = [sys.executable, "-m", "gcore_core", "plugins", "check", "scaffolded"]
    found = subprocess.run(
        checked, env=environment, cwd=directory, stdout=subprocess.PIPE, text=True
    )
    assert found.returncode == 3
    assert "raises NotImplementedError; write what it is to do." in found.stdout
    assert found.stdout.count(f"{directory}/gcore_scaffolded/") == len(found.stdout.splitlines())
    fill_in(directory, ANSWERS[request.node.callspec.params["written"]])
    # The model of the fake engine is none that torch can train; the test below has one.
    after = run_tests(directory, environment, "-k", "not TestWithTorch")
    assert after.returncode == 0, after.stdout
    assert subprocess.run(checked, env=environment, cwd=directory).returncode == 0


@pytest.mark.parametrize("written", ["generator"], indirect=True)
def test_a_new_generator_is_compared_with_a_trainer_on_torch(
    written: tuple[Path, dict[str, str]],
) -> None:
    """Log-probs that are wrong by a little fail, though the engine claims nothing but a push."""
    pytest.importorskip("gcore_torch")
    pytest.importorskip("torch")
    directory, environment = written
    fill_in(directory, WITH_TORCH)
    right = run_tests(directory, environment, "-k", "TestWithTorch")
    assert re.search(r"^3 passed.* 3 not claimed", right.stdout, flags=re.MULTILINE), right.stdout
    (engine,) = directory.glob("gcore_scaffolded/engine.py")
    engine.write_text(
        engine.read_text().replace(
            "return self._engine.step()",
            """ended = self._engine.step()
        for record in ended:
            record.columns["logp"] = record.columns["logp"] - np.float32(0.01)
        return ended""",
        )
    )
    wrong = run_tests(directory, environment, "-k", "TestWithTorch")
    assert re.search(r"^2 failed", wrong.stdout, flags=re.MULTILINE), wrong.stdout


@pytest.mark.parametrize("written", ["generator"], indirect=True)
def test_a_new_generator_says_why_it_is_not_compared_without_torch(
    written: tuple[Path, dict[str, str]],
) -> None:
    directory, environment = written
    hide = """
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "gcore_torch" else find_spec(name)
        """
    (directory / "conftest.py").write_text(textwrap.dedent(hide))
    skipped = run_tests(directory, environment, "-rs", "-k", "TestWithTorch")
    assert skipped.returncode == 0
    assert "no trainer to compare with: install gcore-torch" in skipped.stdout


def test_every_kind_of_template_is_filled_in_by_these_tests() -> None:
    assert sorted(ANSWERS) == scaffold.kinds()


@pytest.mark.parametrize("kind", scaffold.kinds())
def test_a_new_plugin_has_the_style_of_the_project(kind: str, tmp_path: Path) -> None:
    directory = scaffold.write("scaffolded", kind, tmp_path / "new").directory
    for words in (["format", "--check"], ["check", "--select", "E,F,B,UP"]):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *words,
            "--isolated",
            "--line-length",
            "120",
            str(directory),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pip_installs_a_new_plugin_into_a_fresh_environment(tmp_path: Path) -> None:
    core = tmp_path / "core"
    core.mkdir()
    shutil.copytree(
        REPOSITORY / "gcore_core", core / "gcore_core", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, core)
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    programs = tmp_path / "env" / "bin"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, core], check=True, env=clean)
    new = [programs / "g-core", "plugins", "new", "scaffolded", "--kind", "balancer"]
    subprocess.run(new, check=True, env=clean, cwd=tmp_path)
    directory = tmp_path / "gcore-scaffolded"
    subprocess.run([*pip, "-e", f"{directory}[test]"], check=True, env=clean)
    tests = [programs / "python", "-m", "pytest", "-q", directory]
    assert subprocess.run(tests, env=clean, cwd=directory).returncode == 1
    fill_in(directory, ANSWERS["balancer"])
    assert subprocess.run(tests, env=clean, cwd=directory).returncode == 0
    listed = subprocess.run(
        [programs / "g-core", "plugins"], env=clean, capture_output=True, text=True, check=True
    )
    assert re.search(
        r"^scaffolded +ok +gcore-scaffolded +0.1.0$", listed.stdout, flags=re.MULTILINE
    )
