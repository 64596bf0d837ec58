"""Plugs code of a user's into the runs of a benchmark: what burns time, or waits.

filter ``user/burns``: keeps every group, and burns processor time for each record.
advantage ``user/burns``: reward less the mean of the group; burns as much for each record.
filter ``user/waits``: keeps every group; the first one only when ``Gate.open`` was called.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gcore_testing.installed import InstalledPlugins

SOURCE = """
from collections.abc import Iterable
from pathlib import Path
import os
import time

from gcore_core import hookimpl
from gcore_core.contract import providers as p

US = {us}
FOLDER = Path({folder!r})


def burn(records):
    until_s = time.thread_time() + records * US / 1e6
    while time.thread_time() < until_s:
        pass


class Burns:
    def __init__(self, config: None = None) -> None:
        pass

    def keep(self, group):
        burn(len(group.rewards))
        return True, ""


class Waits:
    def __init__(self, config: None = None) -> None:
        self._waited = False

    def keep(self, group):
        if not self._waited:
            (FOLDER / f"here.{{os.getpid()}}").touch()
            while not (FOLDER / "open").exists():
                time.sleep(0.1)
            self._waited = True
        return True, ""


class BurningAdvantage:
    group_size = {group}
    requires = frozenset()

    def __init__(self, config: None = None) -> None:
        pass

    def statistics(self, groups):
        import numpy as np

        return np.zeros(0)

    def of(self, groups, statistics):
        burn(sum(len(group.rewards) for group in groups))
        return [group.rewards - group.rewards.mean() for group in groups]


@hookimpl
def gcore_filters() -> Iterable[p.FilterProvider]:
    for name, made in (("burns", "Burns"), ("waits", "Waits")):
        yield p.FilterProvider(name=name, summary=name, factory=f"gcore_user:{{made}}")


@hookimpl
def gcore_advantages() -> Iterable[p.AdvantageProvider]:
    factory = "gcore_user:BurningAdvantage"
    yield p.AdvantageProvider(name="burns", summary="spends time", factory=factory)
"""


class Gate:
    """Lets runs whose filter is ``user/waits`` begin together.

    Each waits in the first group of its first step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def count(self) -> int:
        """Returns how many controllers have come to the gate."""
        return len(list(self._folder.glob("here.*")))

    def open(self) -> None:
        """Lets all go on, and whoever comes later pass."""
        (self._folder / "open").touch()


@contextlib.contextmanager
def user_code(group: int, us: int) -> Iterator[Gate]:
    """Installs the plugin ``user`` for processes that start inside the block.

    group: records of a group.
    us: microseconds that are burnt for each record.
    """
    path = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="user-") as folder:
        source = SOURCE.format(us=us, folder=folder, group=group)
        InstalledPlugins(Path(folder)).add("user", source)
        os.environ["PYTHONPATH"] = folder + (os.pathsep + path if path else "")
        try:
            yield Gate(Path(folder))
        finally:
            if path is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = path
