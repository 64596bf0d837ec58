"""The plugin ``trackers``: observers that keep a run's metrics in W&B, MLflow or trackio."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import ObserverProvider
from gcore_report.trackers.config import MlflowConfig, TrackioConfig, WandbConfig


@hookimpl
def gcore_observers() -> Iterable[ObserverProvider]:
    yield ObserverProvider(
        name="wandb",
        summary="Weights & Biases, over the network or into files that are sent later",
        factory="gcore_report.trackers.of_wandb:WandbTracker",
        config=WandbConfig,
        needs=("wandb>=0.22",),
    )
    yield ObserverProvider(
        name="mlflow",
        summary="MLflow, in a local database or on a server",
        factory="gcore_report.trackers.of_mlflow:MlflowTracker",
        config=MlflowConfig,
        needs=("mlflow-skinny>=3.7,<4", "sqlalchemy>=2", "alembic>=1.13", "pandas>=2.2"),
    )
    yield ObserverProvider(
        name="trackio",
        summary="trackio, in a local database",
        factory="gcore_report.trackers.of_trackio:TrackioTracker",
        config=TrackioConfig,
        needs=("trackio>=0.40",),
    )
