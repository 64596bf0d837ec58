"""The task of digits.yaml: handwritten digits of 8x8 pixels, drawn on request by a small flow
model.

``teach`` makes a model that has seen the 1797 pictures that come with scikit-learn, half of them
under a wrong name: it draws well, but what was asked for only about half of the time. It also makes
the classifier that rewards and, from the
other half of the pictures, a judge that no reward uses: what only the rewarding classifier likes,
    the judge shows up.

``python digits.py write`` makes ``train.jsonl`` and ``heldout.jsonl`` anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_diffusion.tiny import TinyClassifier, TinyNet
    from torch import Tensor

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TRAIN_ROWS, HELDOUT_ROWS = 10, 500

Progress = Callable[[float, str], None]


def rows(count: int) -> list[dict[str, Any]]:
    """The digits in turn."""
    return [{"prompt": f"the digit {NAMES[i % 10]}", "label": i % 10} for i in range(count)]


def write(directory: Path) -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl``; a sample of a row differs by its seed, not by
    its prompt.
    """
    for name, count in (("train.jsonl", TRAIN_ROWS), ("heldout.jsonl", HELDOUT_ROWS)):
        (directory / name).write_text(
            "".join(json.dumps(row) + "\n" for row in rows(count)), encoding="utf-8"
        )


# -- the model before reinforcement learning -------------------------------------------------------


def teach(directory: Path, config: dict[str, Any], progress: Progress) -> None:
    """Makes the model, the classifier, the judge, and real pictures to compare with.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (420) of 256 pictures each, ``wrong`` (0.5),
    the share of pictures under a random name. progress: called with the share of the work that is
    done and a line for the reader.
    """
    unknown = sorted(set(config) - {"seed", "threads", "steps", "wrong"})
    if unknown:
        raise ValueError(f"teach knows seed, threads, steps and wrong, not {', '.join(unknown)}")
    progress(0.0, "importing torch and scikit-learn")
    import torch
    from gcore_diffusion.tiny import TinyConfig, TinyNet, save_tiny
    from safetensors.torch import save_file

    torch.set_num_threads(int(config.get("threads", 1)))
    seed, steps = int(config.get("seed", 0)), int(config.get("steps", 420))
    (pictures, labels), (real, real_labels) = data()
    half = len(pictures) // 2
    for name, part, width in (("classifier", slice(0, half), 32), ("judge", slice(half, None), 48)):
        progress(0.05, f"training the {name}")
        net = classifier(
            pictures[part], labels[part], seed=1 if name == "classifier" else 2, width=width
        )
        save_file(net.state_dict(), directory / f"{name}.safetensors")
    torch.manual_seed(seed)
    net = TinyNet(TinyConfig())
    mean = flow(
        net,
        pictures,
        labels,
        {"seed": seed, "steps": steps, "wrong": float(config.get("wrong", 0.5))},
        progress,
    )
    save_tiny(mean, directory)
    save_file(
        {
            "images": ((real + 1) * 127.5).round().to(torch.uint8).view(-1, 8, 8, 1),
            "labels": real_labels,
        },
        directory / "real.safetensors",
    )
    progress(1.0, "taught")


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((pictures, labels) to learn from, (pictures, labels) held out); pictures float32[N, 64] in
    -1..1.
    """
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, kept = order[:540], order[540:]
    return (pictures[kept], labels[kept]), (pictures[held], labels[held])


def classifier(
    pictures: Tensor, labels: Tensor, *, seed: int, width: int, steps: int = 400
) -> TinyClassifier:
    """A small convolutional network, taught with noise on the pictures."""
    import torch
    from gcore_diffusion.tiny import TinyClassifier

    torch.manual_seed(seed)
    net = TinyClassifier(width)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-3)
    for _ in range(steps):
        chosen = torch.randint(0, len(pictures), (256,))
        logits = net(pictures[chosen] + 0.15 * torch.randn(256, 64))
        torch.nn.functional.cross_entropy(logits, labels[chosen], label_smoothing=0.05).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def flow(
    net: TinyNet, pictures: Tensor, labels: Tensor, settings: dict[str, Any], progress: Progress
) -> TinyNet:
    """Flow matching with a tenth of the classes left out; returns the moving average of the
    weights.
    """
    import copy

    import torch

    steps, draw = settings["steps"], torch.Generator().manual_seed(settings["seed"])
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-4, fused=True)
    labels, mean = labels.clone(), copy.deepcopy(net)
    wrong = torch.rand(len(labels), generator=draw) < settings["wrong"]
    labels[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=draw)
    for step in range(steps):
        chosen = torch.randint(0, len(pictures), (256,), generator=draw)
        clean, label = pictures[chosen], labels[chosen].clone()
        label[torch.rand(256, generator=draw) < 0.1] = 10
        noise = torch.randn(clean.shape, generator=draw)
        time = torch.sigmoid(torch.randn(256, generator=draw))
        x = (1 - time)[:, None] * clean + time[:, None] * noise
        loss = torch.nn.functional.mse_loss(net(x, time, label), noise - clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 100)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(mean.parameters()),
                list(net.parameters()),
                1 - min(0.999, (1 + step) / (10 + step)),
            )
        if step % 20 == 0:
            progress(
                0.1 + 0.9 * step / steps,
                f"teaching: step {step} of {steps}, loss {loss.item():.3f}",
            )
    return mean


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit("usage: python digits.py write")
    write(Path(__file__).parent)
