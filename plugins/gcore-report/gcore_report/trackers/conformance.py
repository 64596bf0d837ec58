"""Has the contracts of the trackers, on stores of their own and without a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import ObserverContract

from gcore_core.contract.observer import Observer, ObserverContext


class _Local(ObserverContract):
    """Makes a tracker whose store is below the test's directory; skips where a package lacks."""

    package = ""
    settings: dict[str, Any] = {}

    @pytest.fixture(scope="class")
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Gives one place for all tests of a tracker: making a database takes MLflow seconds."""
        return tmp_path_factory.mktemp(self.package)

    @pytest.fixture(autouse=True)
    def _local(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if importlib.util.find_spec(self.package) is None:
            pytest.skip(f"{self.package} is missing: install gcore-report[{self.package}]")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
        monkeypatch.setenv("TRACKIO_DIR", str(store))

    def made(self, context: ObserverContext) -> Observer:
        observer: Observer = self.build(context, checkpoints=True, **self.settings)
        return observer


class TestWandb(_Local):
    provider = "trackers/wandb"
    package = "wandb"
    settings = {"mode": "offline"}


class TestMlflow(_Local):
    provider = "trackers/mlflow"
    package = "mlflow"


class TestTrackio(_Local):
    provider = "trackers/trackio"
    package = "trackio"
