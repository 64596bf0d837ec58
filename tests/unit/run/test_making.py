from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.run.make_model import make_model, models_cache

TEACH = """\
import os, pathlib

def teach(directory, config, progress):
    print("printed by the user")
    progress(0.0, "begun")
    (directory / "config.json").write_text(str(config["size"]))
    (directory / "pid").write_text(str(os.getpid()))
    progress(1.0, "done")
"""


class Report:
    """Remembers progress; ``until(n)`` waits until ``n`` lines have come."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()

    def __call__(self, share: float, message: str) -> None:
        with self._changed:
            self.lines.append((share, message))
            self._changed.notify_all()

    def until(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, timeout=30)


def written(tmp_path: Path, source: str = TEACH) -> Path:
    file = tmp_path / "model.py"
    file.write_text(source)
    return file


def made(file: Path, cache: Path, report: Report | None = None, **config: Any) -> Path:
    make = {"path": str(file), "name": "teach", "config": config or {"size": 3}}
    return make_model(make, cache, report or Report())


def leftovers(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir() if path.suffix not in (".lock", ".log"))


def test_the_cache_may_be_named_from_home_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("G_CORE_CACHE", "~/kept")
    assert models_cache() == tmp_path / "kept" / "models"
    monkeypatch.delenv("G_CORE_CACHE")
    assert models_cache() == tmp_path / ".cache" / "g-core" / "models"


def test_a_cache_that_cannot_be_made_is_named_with_what_sets_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be kept in .*file/models: Not a directory") as e:
        made(written(tmp_path), tmp_path / "file" / "models", Report())
    assert "G_CORE_CACHE" in e.value.todo


def test_a_model_is_made_in_another_process_with_its_progress(tmp_path: Path) -> None:
    report = Report()
    model = made(written(tmp_path), tmp_path / "cache", report)
    assert (model / "config.json").read_text() == "3"
    assert int((model / "pid").read_text()) != os.getpid()
    assert report.lines == [(0.0, "begun"), (1.0, "done")]
    assert leftovers(tmp_path / "cache") == [""]


def test_a_model_is_made_once_per_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = made(written(tmp_path), cache)
    pid = (first / "pid").read_text()
    assert made(written(tmp_path), cache) == first
    assert (first / "pid").read_text() == pid
    assert made(written(tmp_path), cache, size=4) != first
    assert made(written(tmp_path, TEACH + "\n# another comment\n"), cache) != first


def test_a_model_is_made_again_when_a_file_beside_has_changed(tmp_path: Path) -> None:
    file = written(tmp_path, f"import sizes\n{TEACH}")
    (tmp_path / "sizes.py").write_text("SIZE = 1")
    first = made(file, tmp_path / "cache")
    assert made(file, tmp_path / "cache") == first
    (tmp_path / "sizes.py").write_text("SIZE = 2")
    assert made(file, tmp_path / "cache") != first


def test_the_order_of_the_config_does_not_matter(tmp_path: Path) -> None:
    file, cache = written(tmp_path), tmp_path / "cache"
    assert made(file, cache, size=1, depth=2) == made(file, cache, depth=2, size=1)


def test_a_failure_shows_the_last_lines_and_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    source = TEACH + "    (directory / 'half').touch()\n    raise ValueError('too small')\n"
    with pytest.raises(DataError) as error:
        made(written(tmp_path, source), tmp_path / "cache")
    text = str(error.value)
    assert len(text.splitlines()) <= 6
    assert "making the model: teach ended with exit code 1" in text
    assert "ValueError: too small" in text
    log = Path(error.value.facts["log"])
    assert f"log: {log}" in text and "model.py" in log.read_text()
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize("end", ["os._exit(0)", "raise SystemExit"])
def test_what_is_saved_is_no_model_where_the_function_ends_its_process(
    end: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="teach has ended its process with exit code 0 before"):
        made(written(tmp_path, f"{TEACH}    {end}\n"), tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_making_is_tried_again_after_a_failure(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    source = (
        TEACH + f"    if not pathlib.Path({str(flag)!r}).exists(): raise ValueError('not yet')\n"
    )
    with pytest.raises(DataError, match="not yet"):
        made(written(tmp_path, source), tmp_path / "cache")
    flag.touch()
    assert made(written(tmp_path, source), tmp_path / "cache").is_dir()


def test_a_model_of_no_files_is_a_failure(tmp_path: Path) -> None:
    source = "def teach(directory, config, progress): pass\n"
    with pytest.raises(DataError, match="teach saved nothing into the directory"):
        made(written(tmp_path, source), tmp_path / "cache")


def test_a_maker_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    source = "import os\ndef teach(directory, config, progress): os.kill(os.getpid(), 9)\n"
    with pytest.raises(DataError, match="teach was ended by signal 9"):
        made(written(tmp_path, source), tmp_path / "cache")


def test_a_missing_function_is_named_without_our_traceback(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        made(written(tmp_path, "def teech(directory, config, progress): ...\n"), tmp_path / "cache")
    assert "has no function 'teach' (did you mean 'teech'?)" in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"name": "teach"}, "model.make: needs a path and a name"),
        ({"path": "x.py", "name": "teach", "confg": {}}, "model.make: unknown keys: confg"),
        ({"path": "/no/such.py", "name": "teach"}, "model.make.path: /no/such.py: no such file"),
        (
            {"path": __file__, "name": "teach", "config": [1]},
            "model.make.config: must be a mapping, is a list",
        ),
    ],
)
def test_a_wrong_specification_is_refused(
    tmp_path: Path, make: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_model(make, tmp_path, Report())
    assert str(error.value).startswith(message)


def test_what_a_killed_maker_left_is_cleared_away(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model = made(written(tmp_path), cache)
    partial = model.with_suffix(".partial")
    model.rename(partial)
    (partial / ".complete").unlink()
    (partial / "of_the_dead").touch()
    assert not (made(written(tmp_path), cache) / "of_the_dead").exists()
    assert leftovers(cache) == [""]


WAITS = """\
def teach(directory, config, progress):
    (directory / "half").touch()
    progress(0.5, "half")
    with open(config["gate"]) as gate:  # a pipe: blocks until somebody opens its other end
        gate.read()
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def test_concurrent_requests_for_one_model_wait_for_the_first(tmp_path: Path, gate: Path) -> None:
    file, cache = written(tmp_path, WAITS), tmp_path / "cache"
    reports, models = [Report(), Report()], []

    def run(report: Report) -> None:
        models.append(made(file, cache, report, gate=str(gate)))

    first, second = (threading.Thread(target=run, args=(report,)) for report in reports)
    first.start()
    reports[0].until(1)
    second.start()
    reports[1].until(1)
    gate.write_text("go on")
    first.join(30)
    second.join(30)
    assert reports[0].lines == [(0.5, "half")]
    assert reports[1].lines == [(0.0, "waiting for another process that makes the same model")]
    assert len(models) == 2 and models[0] == models[1]


def test_an_interrupt_ends_the_maker_and_leaves_no_half_model(tmp_path: Path, gate: Path) -> None:
    file, cache = written(tmp_path, WAITS), tmp_path / "cache"
    code = (
        "import sys; from pathlib import Path; from gcore_core.run.make_model import make_model\n"
        "make = {'path': sys.argv[1], 'name': 'teach', 'config': {'gate': sys.argv[3]}}\n"
        "make_model(make, Path(sys.argv[2]), lambda share, message: print(message, flush=True))"
    )
    command = [sys.executable, "-c", code, file, cache, gate]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"half\n"
    assert leftovers(cache) == [".partial"]
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors
    assert leftovers(cache) == []
    # nobody is left to read: opening the gate for writing without waiting fails
    with pytest.raises(OSError, match="No such device"):
        os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
