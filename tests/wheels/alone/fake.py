"""Backends without a model."""

from gcore_core.testing.fake import *  # noqa: F403
