"""The plugins as wholes hold their public contracts."""

from __future__ import annotations

from gcore_testing import PluginContract


class TestPlan(PluginContract):
    provider = "plan"


class TestDoctor(PluginContract):
    provider = "doctor"


class TestDemo(PluginContract):
    provider = "demo"


class TestCompletion(PluginContract):
    provider = "completion"
