"""The plugin as a whole holds its public contract; its launcher's is held in test_cluster.py."""

from __future__ import annotations

from gcore_testing import PluginContract


class TestPlugin(PluginContract):
    provider = "ray"
