"""Turns a processor second, next to the environment loops of verifiers and TRL.

Part of environments.py. Each side plays 16 episodes of 30 turns at the same time, with the same
texts and the same tokenizer, and with generation scripted: only what is around it is measured, in
all processes that a side has. The rounds of both sides take turns on one machine. What came out is
compared token by token, with the marks of what the policy has said.

Ours is an environment in a process of its own; its tool is asynchronous, since others are called in
a thread. Of verifiers it is an environment that plays the user, its train client and its renderer,
in front of a server that answers at once; of TRL the loop of ``environment_factory``. Each has a
second form, the one in which it comes: verifiers with a client that is made for each turn, since
its programs are started anew; TRL through ``model.generate``. The claims are against the faster
form.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import episode_rounds as rounds
from report import Claim, median_ratio, repeated
from scripted_episodes import ScriptedEpisodes

HERE = Path(__file__).parent
TOX = HERE.parent / ".tox"
#: How many times in a row ours plays the episodes of a round, which it ends in milliseconds.
OURS_IN_A_ROUND = 4
#: Most rounds against the slower form of a rival.
FORM_ROUNDS = 3
#: Environments with the texts of episode_rounds.py.
OURS = """
from episode_rounds import TURNS, told
from gcore_environments import Observation, Tools


class Talks:
    async def reset(self, row, seed):
        self.turn = 0
        return Observation(messages=[{"role": "user", "content": row["prompt"]}])

    async def step(self, reply):
        self.turn += 1
        if self.turn == TURNS:
            return Observation(done=True)
        return Observation(messages=[{"role": "user", "content": told(self.turn)}])

    async def close(self):
        pass


class Guesses(Tools):
    turn = 0

    async def guess(self, number: int) -> str:
        '''Guesses the number.

        Args:
            number: The guess.
        '''
        self.turn += 1
        return told(self.turn)

    def rewards(self, reply):
        return {"turns": float(self.turn)}
"""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """All ids of an episode, and for each whether the policy has said it."""

    ids: list[int]
    sampled: list[int]

    @property
    def turns(self) -> int:
        """How many turns the policy has had."""
        return sum(now > before for before, now in itertools.pairwise([0, *self.sampled]))

    @property
    def behind_the_prompt(self) -> tuple[list[int], list[int]]:
        """The ids and marks from the first that the policy has said."""
        begin = self.sampled.index(1)
        return self.ids[begin:], self.sampled[begin:]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A rival, and ours with the same conversation.

    name: of the rival.
    packages: what its interpreter must have.
    script: of this folder, which its interpreter runs.
    forms: name -> the last word of the script; the first is the faster one.
    environment: ours, in ``OURS``.
    template: from the rival's interpreter to the chat template of both sides.
    says: from the number of a turn to what the policy says in it.
    bar: how many times as many turns ours is held to.
    """

    name: str
    packages: str
    script: str
    forms: dict[str, str]
    environment: str
    template: Callable[[Path], str]
    says: Callable[[int], str]
    bar: float


def _trls_template(python: Path) -> str:
    """Returns a chat template that TRL knows, from its distribution."""
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    return (Path(found.stdout.strip()) / "chat_templates/qwen3.jinja").read_text()


def _plain_template(python: Path) -> str:
    from gcore_environments.testing import CHATML

    return CHATML


SIDES = (
    Side(
        name="verifiers",
        packages="verifiers==0.4.0 renderers==0.1.12",
        script="verifiers_episodes.py",
        forms={"": "one", "_new_clients": "each"},
        environment="Talks",
        template=_plain_template,
        says=lambda turn: rounds.SAID,
        bar=10.0,
    ),
    Side(
        name="trl",
        packages="trl==1.16.0 torch transformers",
        script="trl_episodes.py",
        forms={"": "ids", "_generate": "generate"},
        environment="Guesses",
        template=_trls_template,
        says=rounds.called,
        bar=2.0,
    ),
)


def add_rival_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for the interpreter of each rival."""
    for side in SIDES:
        parser.add_argument(
            f"--{side.name}-python",
            type=Path,
            help=f"has {side.packages} (default: that of .tox/bench-{side.name}, or of "
            f"$G_CORE_PEERS/{side.name})",
        )


def rivals(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns the claims against each rival that has an interpreter, and says which has none."""
    claims = []
    for side in SIDES:
        python = _python_of(side, getattr(args, f"{side.name}_python"))
        if python is not None:
            claims += _against(side, python, folder, args.rounds)
    return claims


def _python_of(side: Side, given: Path | None) -> Path | None:
    """Returns the interpreter of a rival; None where there is none, and says what to do."""
    peers = os.environ.get("G_CORE_PEERS")
    places = [TOX / f"bench-{side.name}", *([Path(peers) / side.name] if peers else [])]
    pythons = [given] if given else [place / "bin/python" for place in places]
    for python in pythons:
        if python.is_file():
            return python.absolute()
    print(
        f"{side.name} is not measured: there is no {' and no '.join(map(str, pythons))}. "
        f"`tox run -e bench-{side.name} --notest` makes one with {side.packages}; another is given "
        f"by --{side.name}-python.",
        file=sys.stderr,
    )
    return None


def _against(side: Side, python: Path, folder: Path, count: int) -> list[Claim]:
    """Plays rounds of both sides, which take turns; returns the claims."""
    tokenizer = _tokenizer(side.template(python))
    where = folder / side.name
    tokenizer.save_pretrained(where)
    (where / "ours.py").write_text(f"import sys\nsys.path.append({str(HERE)!r})\n{OURS}")
    ours = ScriptedEpisodes(
        f"{where / 'ours.py'}:{side.environment}",
        tokenizer,
        lambda read: side.says(read.count("It is not that.") + 1),
        turns=rounds.TURNS,
        prompt=rounds.ASKED,
    )
    said = [*_ids(tokenizer, rounds.SAID), tokenizer.eos_token_id]
    claims = []
    with contextlib.closing(ours), contextlib.closing(_Engine(said)) as engine:
        for form, word in side.forms.items():
            words = [engine.url] if side.name == "verifiers" else []
            command = [python, HERE / side.script, *words, where, word]
            with contextlib.closing(_Rival(command, where / f"{word}.log")) as rival:
                rival.play()  # until what it makes once is made
                pairs = [
                    _round(rival, ours, ours_first=bool(number % 2))
                    for number in range(count if not form else min(count, FORM_ROUNDS))
                ]
            claims += _claims(f"{side.name}{form}", pairs, None if form else side.bar)
    return claims


def _round(rival: _Rival, ours: ScriptedEpisodes, *, ours_first: bool) -> tuple[float, float]:
    """Returns processor ms a turn of both, the rival's first, when both have played the same."""
    took: dict[str, float] = {}
    played: dict[str, list[Episode]] = {}
    for who in ("ours", "rival") if ours_first else ("rival", "ours"):
        if who == "rival":
            took[who], played[who] = rival.play()
        else:
            took[who], played[who] = _play(ours)
    if difference := difference_of(played["rival"], played["ours"]):
        sys.exit(f"the two sides have not played the same: {difference}")
    turns = rounds.EPISODES * rounds.TURNS
    return 1e3 * took["rival"] / turns, 1e3 * took["ours"] / turns / OURS_IN_A_ROUND


def _play(ours: ScriptedEpisodes) -> tuple[float, list[Episode]]:
    """Returns the seconds of all plays of a round, and the episodes of the last."""
    plays = [ours.play(rounds.EPISODES, rounds.cpu_s) for _ in range(OURS_IN_A_ROUND)]
    episodes = [
        Episode(
            ids=[*record.columns["prompt_ids"].tolist(), *record.columns["action_ids"].tolist()],
            sampled=[0] * len(record.columns["prompt_ids"])
            + record.columns["action_mask"].tolist(),
        )
        for record in plays[-1][1]
    ]
    return sum(seconds for seconds, _ in plays), episodes


def difference_of(theirs: Sequence[Episode], ours: Sequence[Episode]) -> str:
    """Returns in what the episodes of both sides differ behind their prompts; "" for nothing.

    Prompts may: each trainer describes tools in its own words.
    """
    for name, episodes in (("theirs", theirs), ("ours", ours)):
        if len(episodes) != rounds.EPISODES:
            return f"{name} are {len(episodes)} episodes, not {rounds.EPISODES}"
        turns = {one.turns for one in episodes}
        if turns != {rounds.TURNS}:
            return f"{name} have {sorted(turns)} turns, not {rounds.TURNS}"
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a.behind_the_prompt != b.behind_the_prompt:
            return f"episode {number}: {a.behind_the_prompt} and {b.behind_the_prompt}"
    return ""


def _claims(name: str, pairs: Sequence[tuple[float, float]], bar: float | None) -> list[Claim]:
    """Returns the claims of pairs of processor ms a turn, the rival's first."""
    ratio = f"turns_per_cpu_second_over_{name}"
    return [
        repeated(ratio, pairs, median_ratio, "times", bar),
        Claim(f"{name}_turn_cpu_ms", statistics.median(a for a, _ in pairs), "ms"),
        Claim(f"turn_cpu_ms_next_to_{name}", statistics.median(b for _, b in pairs), "ms"),
    ]


def _tokenizer(template: str) -> Any:
    """Returns a tokenizer of bytes with the special tokens of Qwen, which both rivals know."""
    from gcore_environments.testing import byte_tokenizer

    names = ("tool_call", "tool_response", "think")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(template, special, tags)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class _Rival:
    """A process that plays a round when it is asked to."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self._log = log
        reading, writing = os.pipe()
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", rounds.ANSWERS: str(writing)}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **variables},
                pass_fds=(writing,),
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> Any:
        line = self._answers.readline()
        if not line:
            sys.exit(f"{self._process.args} has ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def play(self) -> tuple[float, list[Episode]]:
        """Returns the seconds of a round, and its episodes."""
        assert self._process.stdin is not None
        self._process.stdin.write("play\n")
        self._process.stdin.flush()
        played = self._read()
        if played["errors"]:
            sys.exit(f"{self._process.args}: {played['errors'][:3]}")
        return played["cpu_s"], [Episode(**one) for one in played["episodes"]]

    def close(self) -> None:
        """Lets the process end, which reads that nothing more is asked."""
        with self._answers, self._process:
            pass


class _Engine:
    """A server that gives every request the same ids at once, in the form of vLLM's by ids.

    It runs in this process, whose time is not counted while a rival plays.
    """

    def __init__(self, said: list[int]) -> None:
        content = [{"token": f"token_id:{id}", "logprob": -0.25} for id in said]
        choice = {
            "index": 0,
            "token_ids": said,
            "finish_reason": "stop",
            "logprobs": {"content": content},
        }
        answers = {
            "POST": json.dumps({"request_id": "one", "choices": [choice]}).encode(),
            "GET": json.dumps({"data": [{"id": "policy"}]}).encode(),
        }

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def do_GET(self) -> None:
                body = answers[self.command]
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
