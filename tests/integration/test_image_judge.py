"""An image-text model judges what an image policy draws: real processes, built from a
configuration.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing import fake

from gcore_core.config.plan import load_plan
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.run_files import read_metrics

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gcore_diffusion.tiny import TinyConfig, TinyNet, save_tiny  # noqa: E402
from gcore_language.tiny import save_image_model  # noqa: E402
from gcore_torch.config import TorchGeneratorConfig  # noqa: E402
from gcore_torch.generator import TorchGenerator  # noqa: E402

STEPS, PROMPTS, GROUP = 2, 4, 4

LOOKING = '''
"""A judge that writes down what it saw, where that lies, and what it said; and a reward that writes down the same."""
import json
from dataclasses import dataclass
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_torch.config import TorchGeneratorConfig


def place(array):
    """File and offset of the memory that the array is a view of."""
    address = array.__array_interface__["data"][0]
    for line in open("/proc/self/maps"):
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return f"{Path(path[0].strip()).name} {address - start + int(offset, 16)}" if path else "own memory"


def tell(who, **told):
    with open(Path(__file__).with_name(f"{who}.jsonl"), "a") as file:
        file.write(json.dumps(told) + "\\n")


def seen(record):
    image = record.media["image"]
    tell("scorer", sample=[record.ordinal, record.sample], place=place(image), image=image.ravel().tolist())
    return 0.0


def generator(config, context):
    from gcore_torch.generator import TorchGenerator

    class Looks(TorchGenerator):
        def step(self):
            ended = super().step()
            for record in ended:
                (image,) = record.request.images
                said = record.columns["text"].tobytes().decode()
                tell("judge", place=place(image), image=image.ravel().tolist(), said=said)
            return ended

    return Looks(config, context)


@dataclass(frozen=True, kw_only=True)
class Looking(TorchGeneratorConfig):
    def traits(self):
        return Traits(images=True)


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="-", factory="looking:generator", config=Looking)
'''  # noqa: E501


def write_job(directory: Path, **judged: Any) -> Path:
    """Two controllers; 4 prompts a step, 4 images of each; the judge says characters, the last
    digit counts.
    """
    torch.manual_seed(0)
    net = TinyNet(TinyConfig(width=16, blocks=1))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    (directory / "draws").mkdir()
    save_tiny(net, directory / "draws")
    save_image_model(directory / "judge")
    (directory / "looking.py").write_text(LOOKING)
    rows = [{"prompt": f"digit {i % 10}", "label": i % 10} for i in range(STEPS * PROMPTS)]
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    quality = {
        "images": ["image"],
        "template": "{image}1+",
        "greedy": True,
        "accept_truncated": True,
        "stop_after": 0,
    }
    quality |= {"parser": {"pattern": "(?P<score>[0-9])"}, "scale": [0, 9]}
    job: dict[str, Any] = {
        "run": {"name": "judged", "steps": STEPS},
        "controller": {"shards": 2, "config": {"prompts": PROMPTS}},
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl", "index_dir": "index"}},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": GROUP}},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {
                "use": "diffusion",
                "model": {"path": "draws"},
                "config": {"learning_rate": 1e-3},
            },
            "rollout": {"use": "diffusion", "config": {"steps": 4}},
            "judge": {
                "use": "looking",
                "model": {"path": "judge"},
                "config": {"max_new_tokens": 12},
            },
        },
        "rewards": {
            "quality": {"use": "genrm", "role": "judge", "config": quality | judged},
            "seen": {
                "use": "core/function",
                "weight": 0.0,
                "config": {"path": "looking.py", "name": "seen"},
            },
        },
        "local": ["looking.py"],
    }
    (directory / "job.yaml").write_text(json.dumps(job))
    return directory / "job.yaml"


def run(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gcore_core", "run", "job.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


@dataclass(frozen=True)
class Told:
    """What judge and scorer wrote down, line by line."""

    judge: list[dict[str, Any]]
    scorer: list[dict[str, Any]]


def told(directory: Path) -> Told:
    lines = [(directory / f"{who}.jsonl").read_text().splitlines() for who in ("judge", "scorer")]
    return Told(*([json.loads(line) for line in found] for found in lines))


def test_a_judge_reads_every_image_from_the_generators_store(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [
        row["metrics"]
        for row in read_metrics(tmp_path / "runs/judged/001")
        if "loss" in row["metrics"]
    ]
    assert len(rows) == STEPS
    assert any(0 < metrics["reward/quality"] < 1 for metrics in rows)
    assert all(metrics["controller/bytes_per_record"] / 2 < 1000 for metrics in rows[1:])
    found = told(tmp_path)
    assert len(found.scorer) == STEPS * PROMPTS * GROUP
    stored = {(line["place"], tuple(line["image"])) for line in found.scorer}
    assert len(stored) == len(found.scorer), "every image has a place of its own"
    assert {(line["place"], tuple(line["image"])) for line in found.judge} == stored, (
        "and the judge read it there"
    )
    same_answers(found, tmp_path / "judge")


def same_answers(found: Told, model: Path) -> None:
    """Of the same image, in this process, the judge says the same; and not of every image."""
    assert len({line["said"] for line in found.judge}) > 1
    generator = TorchGenerator(
        TorchGeneratorConfig(max_new_tokens=12),
        WorkerContext(role="judge", model={"path": str(model)}),
    )
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+"}]}]
    for number, line in enumerate(found.judge[:4]):
        image = np.array(line["image"], np.uint8).reshape(8, 8, 1)
        prompt = Prompt(row=0, messages=chat)
        generator.submit(
            [
                SampleRequest(
                    ordinal=number, sample=0, seed=0, prompt=prompt, greedy=True, images=[image]
                )
            ]
        )
        ended: list[Any] = []
        while not ended:
            ended = generator.step()
        assert ended[0].columns["text"].tobytes().decode() == line["said"]


def test_an_unknown_medium_ends_the_run_with_a_list_of_the_existing_ones(
    tmp_path: Path,
) -> None:
    write_job(tmp_path, images=["picture"], template="{picture}1+")
    done = run(tmp_path)
    assert done.returncode != 0
    assert "images: the records have no medium 'picture'." in done.stderr
    assert "They have: condition, image." in done.stderr


def test_a_judge_that_takes_no_images_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_plan(
            write_job(tmp_path), [f"local=[{fake.__file__},looking.py]", "roles.judge.use=fake"]
        )
    assert "rewards.quality: its prompts have images, and fake, which roles.judge uses" in str(
        refused.value
    )
