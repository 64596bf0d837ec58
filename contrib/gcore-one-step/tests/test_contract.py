"""Held to what every plugin and every step program must keep."""

from __future__ import annotations

from gcore_core.testing import ControllerContract, PluginContract


class TestPlugin(PluginContract):
    provider = "one-step"


class TestProgram(ControllerContract):
    provider = "one-step"
    config = {"prompts": 4, "minibatches": 2, "push_bucket_bytes": 1}
    takes_stale = True
    resumes_exactly = False
