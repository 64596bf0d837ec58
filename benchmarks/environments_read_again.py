"""Measures what the torch generator reads again of an episode: its rows are parked between turns.

    python benchmarks/environments_read_again.py [--model DIRECTORY] [--turns 30]
        [--episodes 4] [--json]

prompt_tokens_read_again_share
                        share of the tokens of later turns' prompts that had been read or sampled
                        before, and that are read nevertheless; the last action of each turn is
                        one, since it was sampled and not read
parked_tokens_read_over_new
                        tokens of prompts that are read, for each that nobody had read or sampled
unparked_tokens_read_over_new
                        the same where no row is parked
parked_turn_cpu_ms      processor milliseconds of a turn
unparked_turn_cpu_ms    the same where no row is parked

Episodes are played by ids beside each other. Each turn samples up to 16 tokens, and 8 to 40 more
are given. Without ``--model`` the model is the tests' tiny Llama, whose context is made longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from report import Claim, add_options, publish

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.order import FIRST_TURN
from gcore_core.contract.records import Prompt

TURNS = 30
EPISODES = 4
ANSWER = 16
FIRST = 60
GIVEN = (8, 40)
CONTEXT = 4096


class _Played(NamedTuple):
    """What was counted of episodes.

    new: tokens of prompts that nobody had read or sampled.
    known: the others.
    read: tokens of prompts that the generator has read.
    cpu_s: processor seconds of all turns.
    """

    new: int
    known: int
    read: int
    cpu_s: float


def read_again(
    folder: Path, model: Path | None = None, turns: int = TURNS, episodes: int = EPISODES
) -> list[Claim]:
    """Returns what is read again with parked rows, and what turns cost with them and without.

    folder: an empty one, for a model.
    model: a directory; None: a tiny Llama.
    turns, episodes: how many are played; the episodes beside each other.
    """
    if model is None:
        model = _tiny(folder / "tiny")
    parked, plain = (_play(model, turns, episodes, parks) for parks in (True, False))
    count = turns * episodes
    share = (parked.read - parked.new) / parked.known
    return [
        Claim("prompt_tokens_read_again_share", share, "", 0.05, "<="),
        Claim("parked_tokens_read_over_new", parked.read / parked.new, "x"),
        Claim("unparked_tokens_read_over_new", plain.read / plain.new, "x"),
        Claim("parked_turn_cpu_ms", 1e3 * parked.cpu_s / count, "ms"),
        Claim("unparked_turn_cpu_ms", 1e3 * plain.cpu_s / count, "ms"),
    ]


def _tiny(directory: Path) -> Path:
    from gcore_language.tiny import save_model

    save_model(directory, "llama")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}))
    return directory


def _play(model: Path, turns: int, episodes: int, parks: bool) -> _Played:
    """Plays episodes on a generator of its own.

    parks: whether rows are parked.
    """
    from gcore_torch.config import TorchGeneratorConfig
    from gcore_torch.generator import TorchGenerator

    context = WorkerContext(role="rollout", model={"path": str(model)}, acts=True)
    config = TorchGeneratorConfig(max_new_tokens=ANSWER, context_length=CONTEXT)
    generator = TorchGenerator(config, context)
    decoder = generator._usual
    decoder._may_keep = parks  # type: ignore[attr-defined]
    draw = np.random.default_rng(0)
    words = len(generator.tokenizer)
    prompts = [draw.integers(3, words, FIRST).astype(np.int32) for _ in range(episodes)]
    before = [0] * episodes  # tokens that were read or sampled
    new = known = 0
    began_s = time.process_time()
    for turn in range(turns):
        generator.submit(
            [
                SampleRequest(
                    ordinal=FIRST_TURN + turn * episodes + place,
                    sample=0,
                    seed=turn * episodes + place,
                    prompt=Prompt(row=0, text=""),
                    ids=ids,
                )
                for place, ids in enumerate(prompts)
            ]
        )
        known += sum(before)
        new += sum(map(len, prompts)) - sum(before)
        ended = 0
        while ended < episodes:
            for record in generator.step():
                ended += 1
                if record.status == "failed":
                    sys.exit(f"a turn has failed: {record.reason}")
                place = (record.request.ordinal - FIRST_TURN) % episodes
                answered = np.concatenate([prompts[place], record.columns["action_ids"]])
                before[place] = len(answered)
                given = draw.integers(3, words, draw.integers(*GIVEN)).astype(np.int32)
                prompts[place] = np.concatenate([answered, given])
    cpu_s = time.process_time() - began_s
    read = decoder.read_tokens
    generator.close()
    return _Played(new, known, read, cpu_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face layout")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        claims = read_again(Path(folder), args.model, args.turns, args.episodes)
    packages = ("gcore-core", "gcore-torch", "torch", "transformers")
    return publish("environments", claims, args, packages)


if __name__ == "__main__":
    sys.exit(main())
