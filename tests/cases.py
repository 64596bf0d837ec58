"""Runs jobs and rewards that people in this field have reported as failing elsewhere.

    python tests/cases.py [NAME ...] [--folder FOLDER] [--json]

Each case is a folder of ``tests/cases``: what it lacks of a job comes from ``base``, and what it
has in ``change.py`` is put behind ``make.py``. A case is right when it does what its sentence
below says. Each one prints what was said, and the program ends with 1 when one is wrong.

--folder: another folder with cases, whole ones; theirs are named alike, behind any prefix.
--json: prints one object, name -> {right, seconds, said}.

``two-slots`` makes a new venv of README's set-up, and ``last-save`` needs root; without that it is
left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = Path(__file__).with_name("cases")
BASE = CASES / "base"
TIMEOUT_S = 300.0
LEFT_OUT = "left out: "
#: A traceback of ours in what a user sees is never right.
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, kw_only=True)
class Said:
    """Holds what a command ended with: its exit code, and what it printed."""

    code: int
    text: str

    def names(self, *patterns: str) -> bool:
        """Says whether it failed in words that hold every pattern, and without a traceback."""
        return (
            self.code != 0
            and TRACEBACK not in self.text
            and all(re.search(pattern, self.text, re.IGNORECASE) for pattern in patterns)
        )


def command(folder: Path, *words: str, **variables: str) -> Said:
    """Runs a command in a folder, with its output in one text."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Said(code=done.returncode, text=done.stdout)


def g_core(folder: Path, *words: str) -> Said:
    """Runs the console script: ``python -m`` would put the folder on the search path."""
    return command(folder, str(Path(sys.executable).with_name("g-core")), *words)


def check_then_run(folder: Path, *overrides: str) -> Said:
    """Checks a job, makes its model by a first run where check passes, and checks it again.

    Returns what the first command said that refused the job, or what the run said.
    """
    checked = g_core(folder, "check", "job.yaml", *overrides)
    if checked.code:
        return checked
    return g_core(folder, "run", "job.yaml", *overrides)


def records(folder: Path) -> Iterator[Mapping[str, list[int]]]:
    """Yields what the run in a folder has drawn: rows of its tokens.jsonl."""
    (file,) = folder.glob("runs/*/001/tokens.jsonl")
    for line in file.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def text_of(ids: list[int]) -> str:
    """Returns the text of ids of the cases' tokenizer: one token for each character."""
    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *map(chr, range(32, 127)), "\n"]
    return "".join(words[i] if i < len(words) else "<none>" for i in ids)


def prompts(folder: Path) -> set[str]:
    return {text_of(row["prompt_ids"]) for row in records(folder)}


# -- what is right -------------------------------------------------------------------------------


def alarm_in_reward(folder: Path) -> tuple[bool, str]:
    """The reward is 1.000 in its own process and inline."""
    said = [
        g_core(folder, "run", "job.yaml", f"launcher.use=core/{launcher}")
        for launcher in ("inline", "local")
    ]
    right = all(one.code == 0 and "reward 1.000" in one.text for one in said)
    return right and all("reward 0.000" not in one.text for one in said), said[1].text


def unloadable(*patterns: str) -> Callable[[Path], tuple[bool, str]]:
    """The job is refused before its first step, in words that hold the patterns."""

    def judge(folder: Path) -> tuple[bool, str]:
        said = check_then_run(folder)
        return said.names(*patterns) and "step 1/" not in said.text, said.text

    return judge


def answer_in_prompt(folder: Path) -> tuple[bool, str]:
    """The job is refused with a row, or no prompt holds the answer."""
    said = check_then_run(folder)
    if said.code:
        return said.names(r"row \d", "assistant"), said.text
    return all(prompt.count("assistant") == 1 for prompt in prompts(folder)), said.text


def no_score_is_one(folder: Path) -> tuple[bool, str]:
    """A wrong program is never scored 1: by no test, or by a test that is no test."""
    said = command(folder, sys.executable, "score.py", "code")
    return said.code == 0 and "value=1" not in said.text, said.text


def all_ok(script: str, *words: str) -> Callable[[Path], tuple[bool, str]]:
    """The script finds what is right in each of its lines."""

    def judge(folder: Path) -> tuple[bool, str]:
        said = command(folder, sys.executable, script, *words)
        return said.code == 0 and "BAD" not in said.text and "ok " in said.text, said.text

    return judge


def answer_no_text(folder: Path) -> tuple[bool, str]:
    """The number 3.0 equals the text 3; a list is refused with its row."""
    said = command(folder, sys.executable, "score.py", "exact-match")
    number, values = (said.text.splitlines() + ["", ""])[:2]
    return "value=1.0" in number and "failed" in values, said.text


def two_slots(folder: Path) -> tuple[bool, str]:
    """A policy of two slots starts with what README installs."""
    venv = folder / "venv"
    made = command(folder, sys.executable, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    words = (python, "-m", "pip", "install", "-q", "-r", "requirements.txt")
    made = command(ROOT, *words) if not made.code else made
    if made.code:
        return False, made.text
    job = str(ROOT / "recipes" / "quickstart.yaml")
    words = (python, "-m", "gcore_core", "run", job, "roles.policy.slots=2", "run.steps=1")
    said = command(folder, *words)
    return said.code == 0 and "step 1/1" in said.text, said.text


def text_parts(folder: Path) -> tuple[bool, str]:
    """The parts are joined to a text, or the row is refused."""
    said = check_then_run(folder)
    if said.code:
        return said.names(r"row \d"), said.text
    shown = prompts(folder)
    right = not any("{'" in prompt or "[{" in prompt for prompt in shown)
    return right and any("1+1" in prompt for prompt in shown), said.text


def end_behind_prompt(folder: Path) -> tuple[bool, str]:
    """No prompt ends with an end token that the tokenizer added, or the model is refused."""
    said = check_then_run(folder)
    if said.code:
        return said.names("end"), said.text
    return not any(prompt.endswith("<eos>") for prompt in prompts(folder)), said.text


def end_out_of_range(folder: Path) -> tuple[bool, str]:
    """The error names file, key and id; or the id is left out, and that is said."""
    said = check_then_run(folder)
    if said.code:
        return said.names("generation_config.json", "eos_token_id", "128009"), said.text
    return "step 2/2" in said.text and "128009" in said.text, said.text


def linked_venv(folder: Path) -> tuple[bool, str]:
    """Programs are confined in a venv that is reached by a link."""
    link = folder / "link"
    link.symlink_to(sys.prefix)
    said = command(folder, "link/bin/python", "-m", "gcore_core", "run", "job.yaml")
    return said.code == 0 and "step 2/2" in said.text, said.text


def last_save(folder: Path) -> tuple[bool, str]:
    """A run whose last save finds no room says so, and has the weights once there is some."""
    if os.geteuid():
        return True, LEFT_OUT + "it mounts a small disk, which needs root"
    return _on_small_disk(folder)


def _on_small_disk(folder: Path) -> tuple[bool, str]:
    disk = folder / "full"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o")
    subprocess.run((*mount, "size=300k", "tmpfs", str(disk)), check=True)
    g_core = str(Path(sys.executable).with_name("g-core"))
    words = [g_core, "run", "job.yaml", "launcher.use=core/local"]
    said: list[str] = []
    try:
        with subprocess.Popen(
            [*words, "run.dir=full/run"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                said.append(line)
                if "No space left" in line or "free some space" in line:
                    subprocess.run((*mount, "remount,size=3m", str(disk)), check=True)
        text = "".join(said)
        whole = (disk / "run" / "weights" / "model.safetensors").is_file()
        right = run.returncode == 0 and whole and "space" in text and TRACEBACK not in text
    finally:
        subprocess.run(("umount", "-l", str(disk)), check=True)
    return right, text


def greedy_groups(folder: Path) -> tuple[bool, str]:
    """Check refuses groups whose answers are all the same."""
    said = g_core(folder, "check", "job.yaml")
    return said.names("temperature"), said.text


def name_is_a_number(folder: Path) -> tuple[bool, str]:
    """A run is called what was written."""
    names_given = ["0012", "1e3", "yes", "2026-11-28", "0x1F"]
    said = [g_core(folder, "config", "job.yaml", f"run.name={name}").text for name in names_given]
    names = [re.search(r"^  name: (.*)$", text, re.MULTILINE) for text in said]
    found = [name[1].strip("'\"") if name else "" for name in names]
    return found == names_given, f"{found}\n"


def import_beside(folder: Path) -> tuple[bool, str]:
    """A reward's file imports a file beside it, or check says what to write instead."""
    for launcher in ("inline", "local"):
        said = check_then_run(folder, f"launcher.use=core/{launcher}")
        if said.code or "step 2/2" not in said.text:
            return False, said.text
    return True, said.text


def bytes_in_rows(folder: Path) -> tuple[bool, str]:
    """A row that does not fit into JSON is refused with its number."""
    said = command(folder, sys.executable, "train.py")
    return said.code != 0 and bool(re.search(r"row 0.*JSON|JSON.*row 0", said.text)), said.text


def long_prompts(folder: Path) -> tuple[bool, str]:
    """The run goes on with other rows, or the error names a row, its tokens and the limit."""
    said = check_then_run(folder)
    if said.code:
        return said.names(r"row \d", "512"), said.text
    return "step 4/4" in said.text, said.text


def ids_without_token(folder: Path) -> tuple[bool, str]:
    """No id without a token is drawn, or a sentence says how many there are."""
    said = check_then_run(folder)
    drawn = [i for row in records(folder) for i in row["action_ids"]] if not said.code else []
    counted = re.search(r"\b59\b.*without a token|without a token.*\b59\b", said.text)
    return bool(drawn) and (max(drawn) < 101 or counted is not None), said.text


MISSING = unloadable("random|lack|missing", r"model\.layers\.|base_model")
#: Name of a case -> what is right, which says it in its first line.
RIGHT: dict[str, Callable[[Path], tuple[bool, str]]] = {
    "alarm-in-reward": alarm_in_reward,
    "more-layers": MISSING,
    "prefixed-names": MISSING,
    "answer-in-prompt": answer_in_prompt,
    "tests-as-json-text": no_score_is_one,
    "extract-number": all_ok("extract.py"),
    "last-box": all_ok("score.py", "math"),
    "exponent": all_ok("score.py", "math"),
    "answer-no-text": answer_no_text,
    "two-slots": two_slots,
    "system-role": unloadable(r"row \d", "System role not supported"),
    "text-parts": text_parts,
    "eos-behind-prompt": end_behind_prompt,
    "eos-out-of-range": end_out_of_range,
    "linked-venv": linked_venv,
    "last-save": last_save,
    "words-around-a-number": all_ok("score.py", "numeric"),
    "greedy-groups": greedy_groups,
    "name-is-a-number": name_is_a_number,
    "import-beside": import_beside,
    "bytes-in-rows": bytes_in_rows,
    "long-prompts": long_prompts,
    "quantised": unloadable("quantis|quantiz", "train"),
    "nan-in-weights": unloadable(r"model\.norm\.weight", "nan|finite"),
    "ids-without-token": ids_without_token,
}


def lay(case: Path, folder: Path) -> None:
    """Copies a case into a folder, with what it lacks of the base."""
    shutil.copytree(BASE, folder, dirs_exist_ok=True)
    if case.is_dir():
        shutil.copytree(case, folder, dirs_exist_ok=True)
    change = folder / "change.py"
    if change.is_file():
        make = folder / "make.py"
        make.write_text(f"{make.read_text()}\n\n{change.read_text()}")


def run_case(name: str, case: Path) -> dict[str, object]:
    """Runs a case in a directory of its own; returns right, seconds and what was said."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="g-core-case-") as place:
        folder = Path(place) / "case"
        lay(case, folder)
        right, said = RIGHT[name](folder)
    seconds = round(time.monotonic() - began_s, 1)
    return {"right": right, "seconds": seconds, "said": said}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RIGHT))
    parser.add_argument("--folder", type=Path, default=CASES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(RIGHT))
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}")
    results = {}
    for name in options.names or RIGHT:
        (case, *_) = [*options.folder.glob(f"*{name}"), options.folder / name]
        results[name] = run_case(name, case)
        if not options.json:
            print(f"== {name}: {'right' if results[name]['right'] else 'WRONG'}", flush=True)
            print(str(results[name]["said"]).strip()[-2000:], flush=True)
    if options.json:
        print(json.dumps(results))
    wrong = [name for name, result in results.items() if not result["right"]]
    if not options.json:
        print(f"{len(results) - len(wrong)} of {len(results)} right", end="")
        print(f"; wrong: {', '.join(wrong)}" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
