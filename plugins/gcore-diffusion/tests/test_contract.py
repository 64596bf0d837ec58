"""The public contracts hold for the plugin: what ``g-core conformance diffusion`` runs."""

from __future__ import annotations

from gcore_diffusion.conformance import (
    TestBrightness,
    TestClassifier,
    TestCompressibility,
    TestGenerator,
    TestPreference,
    TestTrainer,
    TestTrainerWithGenerator,
)
from gcore_testing import PluginContract

__all__ = [
    "TestBrightness",
    "TestClassifier",
    "TestCompressibility",
    "TestGenerator",
    "TestPreference",
    "TestTrainer",
    "TestTrainerWithGenerator",
]


class TestPlugin(PluginContract):
    provider = "diffusion"
