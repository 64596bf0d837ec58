"""Rewrites imports, factory strings and requirements of G-Core 0.2's distributions to those of 0.3.

    python rename_packages.py PATH ...

It changes text files in place: Python, YAML, TOML, JSON, Markdown and templates, and prints their
names. Run a formatter that sorts imports afterwards. Names of plugins stay, so jobs stay as they
are. A requirement keeps its version: say yourself that it is one of 0.3.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".tmpl", ".ini", ".txt", ".cfg"}

#: Package of 0.2 -> package of 0.3.
PACKAGES = {
    "gcore_balance": "gcore_placement.balance",
    "gcore_context": "gcore_language.context",
    "gcore_critic": "gcore_algorithms.critic",
    "gcore_eval": "gcore_report.eval",
    "gcore_genrm": "gcore_rewards.genrm",
    "gcore_human": "gcore_rewards.human",
    "gcore_jobs": "gcore_tools.jobs",
    "gcore_offline": "gcore_algorithms.offline",
    "gcore_queueing": "gcore_placement.queueing",
    "gcore_ray": "gcore_nodes.ray",
    "gcore_refine": "gcore_algorithms.refine",
    "gcore_shrink": "gcore_tools.shrink",
    "gcore_sim": "gcore_placement.sim",
    "gcore_teacher": "gcore_algorithms.teacher",
    "gcore_trackers": "gcore_report.trackers",
    "gcore_venv": "gcore_tools.venv",
}
#: Distribution of 0.2 whose libraries are an extra in 0.3 -> that extra.
OWN_EXTRA = {"gcore-eval": "eval", "gcore-human": "human", "gcore-jobs": "jobs", "gcore-sim": "sim"}
#: (distribution of 0.2, its extra) -> the extra in 0.3, where it has another name.
EXTRAS = {("gcore-ray", "engine"): "ray"}

#: What became a distribution of its own.
_KIT = re.compile(r"(?<![\w./-])gcore_core\.testing(?!\w)")
_KIT_EXTRA = re.compile(r"(?<![\w-])gcore-core\[testing\]")
_NAMES = "|".join(sorted(PACKAGES, key=len, reverse=True))
_PACKAGE = re.compile(rf"(?<![\w./-])({_NAMES})(?!\w)")
_DISTRIBUTION = re.compile(rf"(?<![\w-])({_NAMES.replace('_', '-')})(?:\[([\w,\s-]+)\])?(?![\w-])")


def rewritten(text: str) -> str:
    """Returns the text with every name of 0.2 in it replaced."""
    text = _KIT_EXTRA.sub("gcore-testing", _KIT.sub("gcore_testing", text))
    return _DISTRIBUTION.sub(_distribution, _PACKAGE.sub(lambda m: PACKAGES[m[1]], text))


def _distribution(match: re.Match[str]) -> str:
    """Returns the requirement of 0.3 for one of 0.2, its version left out."""
    old = match[1]
    extras = [extra.strip() for extra in (match[2] or "").split(",") if extra.strip()]
    extras = [EXTRAS.get((old, extra), extra) for extra in extras]
    if old in OWN_EXTRA:
        extras.insert(0, OWN_EXTRA[old])
    new = PACKAGES[old.replace("-", "_")].partition(".")[0].replace("_", "-")
    return f"{new}[{','.join(extras)}]" if extras else new


def main() -> None:
    for word in sys.argv[1:]:
        path = Path(word)
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in SUFFIXES and file.is_file():
                text = file.read_text(encoding="utf-8")
                new = rewritten(text)
                if new != text:
                    file.write_text(new, encoding="utf-8")
                    print(file)


if __name__ == "__main__":
    main()
