"""What an author would write at the marks of a new plugin."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

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
    "placement": [
        """
        cells = {role: tuple(Cell((device,)) for device in devices[:slots]) for role, slots in window.slots.items()}
        return Decision(partition=partition or Partition(cells))
        """  # noqa: E501
    ],
    "advantage": ["return (rewards - rewards.mean()) / rewards.std()"],
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
    "environment": ['return "?"'],
    "command": ["print((directory / 'metrics.jsonl').read_text())\nreturn 0"],
    "launcher": [
        "return await self._local.nodes(devices)",
        "return self._local.site(where, supervisor, logs)",
    ],
    "generator": [
        """
        from gcore_testing import fake
        from gcore_testing.safetensors_files import write_safetensors
        write_safetensors(tmp_path / "model.safetensors", fake.tensors_of(fake.initial_logits(0)))
        return {"path": str(tmp_path)}
        """,
        """
        from gcore_testing import fake
        limit = fake.FakeGeneratorConfig(max_new_tokens=8, temperature=config.temperature)
        self._engine = fake.FakeGenerator(limit, context)
        """,
        "self._engine.submit(requests)",
        "return self._engine.step()",
        "self._engine.begin_weights(plan)",
        "self._engine.load_weights(tensors)",
        "self._engine.commit_weights(plan)",
    ],
    "trainer": [
        "return {}",
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
    ],
}

#: What an author would write at a generator's marks whose engine is torch.
WITH_TORCH = [
    """
    from gcore_language.tiny import save_model
    save_model(tmp_path, "llama")
    return {"path": str(tmp_path)}
    """,
    """
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator
    limit = TorchGeneratorConfig(
        max_new_tokens=config.max_new_tokens, temperature=config.temperature
    )
    self._engine = TorchGenerator(limit, context)
    """,
    *ANSWERS["generator"][2:],
]


def fill_in(directory: Path, answers: list[str]) -> None:
    """Writes the answers where the marks are."""
    left = iter(answers)

    def answer(match: re.Match[str]) -> str:
        return textwrap.indent(textwrap.dedent(next(left)).strip("\n") + "\n", match[1])

    for file in sorted(directory.rglob("*.py")):
        file.write_text(MARKED.sub(answer, file.read_text()))
    assert next(left, None) is None, "there are more answers than marks"
