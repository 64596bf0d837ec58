"""Checks that both sides of a worker's start run the same versions; else it does not start.

The worker compares before it imports a factory, the supervisor when it is greeted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gcore_core import __version__
from gcore_core.contract.errors import PluginIncompatible
from gcore_core.contract.installing import install_command
from gcore_core.runtime.messages import Versions


def versions(plugins: Iterable[str]) -> Versions:
    """Returns this interpreter's versions of the core and of these distributions.

    The version of a distribution that is not installed is "".
    """
    names = list(plugins)
    plugin_versions = {}
    if names:
        from importlib.metadata import (
            distributions,
        )  # slow to import, and a worker of the core alone needs none of it

        plugin_versions = {
            name: next((item.version for item in distributions(name=name)), "") for name in names
        }
    return Versions(sys.executable, __version__, plugin_versions)


def agree(name: str, *, worker: Versions, supervisor: Versions) -> None:
    """Raises PluginIncompatible, with both interpreters, at the first distribution whose versions
    differ.
    """
    worker_versions = {"gcore-core": worker.core, **worker.plugins}
    for distribution, version in {"gcore-core": supervisor.core, **supervisor.plugins}.items():
        other = worker_versions.get(distribution, "")
        if other != version:
            raise PluginIncompatible(
                (
                    f"its {distribution} is {other or 'missing'}, the supervisor's is "
                    f"{version or 'missing'}."
                ),
                where=name,
                why=(
                    f"{other or 'missing'} in {worker.python}\n{version or 'missing'} in "
                    f"{supervisor.python}"
                ),
                todo="install the same: "
                + install_command(f"{distribution}=={version}", python=worker.python),
                distribution=distribution,
                python=worker.python,
            )
