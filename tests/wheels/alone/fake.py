"""Backends without a model."""

from gcore_testing.fake import *  # noqa: F403
