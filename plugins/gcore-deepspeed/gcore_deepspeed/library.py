"""Imports DeepSpeed so that it compiles nothing and waits for no other process's build.

By itself DeepSpeed's communication starts by building a C++ extension for CPUs, which takes
minutes. A build that is killed leaves a lock in the user's cache, on which every later start hangs.
gloo does the same work.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command

#: The plugin reaches into DeepSpeed's optimizers (to discard a gradient, to set moments), so it
#: may fail with other versions.
VERSIONS = SpecifierSet(">=0.19.8,<0.20")


def import_deepspeed(context: WorkerContext, device: torch.device) -> Any:
    """Imports the module ``deepspeed`` for this device.

    Raises ConfigError for another version, or when this process has imported it for another kind of
    device.
    """
    _check_version(context)
    os.environ["DS_ACCELERATOR"] = device.type  # read when deepspeed is first imported
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cpu":
        os.environ["LOCAL_SIZE"] = str(context.ranks)  # without it DeepSpeed runs numactl to count
    private = Path(context.rendezvous or context.directory).absolute()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(private / f"torch_extensions-{os.getpid()}")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device_type = get_accelerator().device_name()
    if device_type != device.type:
        raise ConfigError(
            (
                f"DeepSpeed was imported for {device_type} in this process and cannot change to "
                f"{device.type}."
            ),
            where=f"roles.{context.role}.config.device",
        )
    # with an empty list DeepSpeed builds no extension, nor runs the compiler to see which it could
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def forget_groups() -> None:
    """Makes DeepSpeed forget its groups; call it after the process group is gone.

    A later engine in this process would use them otherwise.
    """
    from deepspeed.utils import groups

    groups._release_process_group_references()


def _check_version(context: WorkerContext) -> None:
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version not in VERSIONS:
        raise ConfigError(
            f"this trainer needs deepspeed {VERSIONS}, but found {version or 'none'}.",
            where=f"roles.{context.role}.python",
            todo=install_command("gcore-deepspeed[engine]"),
        )
