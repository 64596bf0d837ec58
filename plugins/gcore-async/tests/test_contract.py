"""Held to what every plugin and every step program must keep."""

from __future__ import annotations

from typing import Any, ClassVar

from gcore_testing import ControllerContract, PluginContract


class TestPlugin(PluginContract):
    provider = "async"


class TestSynchronous(ControllerContract):
    """With nothing ahead it is a synchronous program."""

    provider = "async"
    config: ClassVar[dict[str, Any]] = {"prompts": 4, "push_bucket_bytes": 1, "ahead": 0, "age": 0}
    takes_stale = True
    resumes_exactly = False


class TestOneAhead(ControllerContract):
    provider = "async"
    config: ClassVar[dict[str, Any]] = {"prompts": 4, "push_bucket_bytes": 1, "ahead": 1, "age": 1}
    takes_stale = True
    resumes_exactly = False


class TestTwoAhead(ControllerContract):
    provider = "async"
    config: ClassVar[dict[str, Any]] = {
        "prompts": 4,
        "push_bucket_bytes": 1,
        "ahead": 2,
        "age": 4,
        "midway": "recompute",
    }
    takes_stale = True
    resumes_exactly = False
