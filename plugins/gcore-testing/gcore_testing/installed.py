"""Fabricates installed distributions in a directory, so that discovery is tested without pip.

with InstalledPlugins(tmp_path) as installed:
    installed.add("greedy", "from gcore_core import hookimpl\\n...")
"""

from __future__ import annotations

import importlib
import sys
import textwrap
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

REQUIRES = ("gcore-core>=0.3,<0.4",)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """Says what a fabricated distribution declares.

    ``distribution`` and ``module`` default to gcore-<plugin> and gcore_<plugin>.

    requires: its requirements, one a line of its metadata.
    egg_info: whether its metadata has the older form, a folder ``.egg-info``.
    """

    distribution: str = ""
    version: str = "0.1.0"
    module: str = ""
    requires: Sequence[str] = REQUIRES
    egg_info: bool = False


class InstalledPlugins:
    """Makes fabricated distributions in a directory.

    As a context, it is first on ``sys.path`` until the context ends.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._modules: set[str] = set()

    def add(
        self,
        plugin: str,
        source: str = "",
        wheel: Wheel | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Writes the metadata, the plugin's module and further ``files`` (path -> text).

        Files that were there are replaced.
        """
        wheel = wheel or Wheel()
        name = wheel.distribution or f"gcore-{plugin}"
        module = wheel.module or f"gcore_{plugin.replace('-', '_')}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_metadata(name, f"[gcore]\n{plugin} = {module}\n", wheel)
        self._write(f"{module}.py", source)
        for path, text in (files or {}).items():
            self._write(path, text)
        importlib.invalidate_caches()

    def __enter__(self) -> InstalledPlugins:
        sys.path.insert(0, str(self.directory))
        importlib.invalidate_caches()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.path.remove(str(self.directory))
        for name in (
            self._modules
        ):  # but not a real module of the same name, imported before this one shadowed it
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is not None and Path(file).is_relative_to(self.directory):
                del sys.modules[name]
        importlib.invalidate_caches()

    def _write_metadata(self, name: str, entry_points: str, wheel: Wheel) -> None:
        folder = name.replace("-", "_")
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {wheel.version}\n"
        if wheel.egg_info:
            self._write(f"{folder}.egg-info/PKG-INFO", head)
            self._write(f"{folder}.egg-info/requires.txt", "\n".join(wheel.requires))
            self._write(f"{folder}.egg-info/entry_points.txt", entry_points)
            return
        requires = "".join(f"Requires-Dist: {line}\n" for line in wheel.requires)
        self._write(f"{folder}-{wheel.version}.dist-info/METADATA", head + requires)
        self._write(f"{folder}-{wheel.version}.dist-info/entry_points.txt", entry_points)

    def _write(self, path: str, text: str) -> None:
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text), encoding="utf-8")
        if target.suffix == ".py":
            self._modules.add(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))


def empty_venv(root: Path) -> InstalledPlugins:
    """Makes a virtual environment without pip; returns what can be installed into it.

    Its interpreter is ``root/bin/python``.
    """
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python3*/site-packages")
    return InstalledPlugins(site)
