"""What may be set under ``config:`` of the observers ``trackers/...``.

No field takes a secret: the configuration is written into the run's directory and sent to the
tracker. Keys and passwords come from the environment, as each package reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from gcore_core.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """What all trackers have."""

    project: str = "g-core"
    """Project, in MLflow the experiment, in which the run is kept."""
    name: str = ""
    """Name of the run there. Empty: the last two parts of the run's directory, as quickstart-001.
    """
    samples_every: int = 1
    """Least number of steps between two tables of samples. They come with evaluations; 0: none."""
    checkpoints: bool = False
    """Keep each checkpoint, and the final weights, as artifacts. That takes time and space: see
    observers.<name>.timeout_s.
    """

    def __post_init__(self) -> None:
        if not self.project.strip():
            raise ConfigError("must not be empty.", where="project")
        if self.samples_every < 0:
            raise ConfigError(
                f"must be at least 0, is {self.samples_every}.", where="samples_every"
            )


@dataclass(frozen=True, kw_only=True)
class WandbConfig(TrackerConfig):
    """Keeps a run in Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`."""

    mode: Literal["online", "offline", "disabled"] = "online"
    """online: sent as the run goes. offline: kept in the run's directory, for `wandb sync`.
    disabled: nothing is kept.
    """
    entity: str = ""
    """User or team that owns the project. Empty: as W&B is set up for this user."""
    tags: list[str] = field(default_factory=list)
    """Words by which the run is found."""
    group: str = ""
    """Group of runs that are shown together."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig(TrackerConfig):
    """Keeps a run in MLflow. A password comes from MLFLOW_TRACKING_PASSWORD, a token likewise."""

    tracking_uri: str = ""
    """Where MLflow keeps runs, such as sqlite:///FILE or https://SERVER. Empty:
    MLFLOW_TRACKING_URI, else the file mlflow.db beside the run's directory.
    """
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme = urlsplit(self.tracking_uri).scheme
        if self.tracking_uri not in ("", "databricks") and scheme in ("", "file"):
            raise ConfigError(
                f"MLflow keeps runs in no directory any more, such as {self.tracking_uri!r}.",
                where="tracking_uri",
                todo="name a database, as in sqlite:///mlflow.db, or a server",
            )
        if self.tracking_uri.startswith("http") and "@" in urlsplit(self.tracking_uri).netloc:
            raise ConfigError(
                "must not hold a user or a password; the configuration is no place for secrets.",
                where="tracking_uri",
                todo="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
            )


@dataclass(frozen=True, kw_only=True)
class TrackioConfig(TrackerConfig):
    """Keeps a run in trackio."""

    store: str = ""
    """Directory of trackio's database. Empty: TRACKIO_DIR, else trackio's own place in the home
    directory, which `trackio show` reads.
    """
    group: str = ""
    """Group of runs that are shown together."""
