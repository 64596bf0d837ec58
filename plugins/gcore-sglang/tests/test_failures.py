"""Servers that do not start, or do not live on: each failure is told, and nothing is left
behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gcore_sglang.stepwise import held
from gcore_testing.contracts.weights import push, read_model

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError, DeadlineExceeded, WorkerDied
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt
from tests.support.broken_models import make_directory

pytestmark = pytest.mark.engine


@pytest.fixture
def context(directories: dict[str, Path], tmp_path: Path) -> WorkerContext:
    return WorkerContext(
        role="rollout", model={"path": str(directories["llama"])}, directory=str(tmp_path)
    )


def make(
    context: WorkerContext,
    *,
    engine: dict[str, Any] | None = None,
    path: Path | str = "",
    **settings: Any,
) -> Any:

    from gcore_sglang.config import SglangGeneratorConfig
    from gcore_sglang.engine import SglangGenerator

    model = {"path": str(path or context.model["path"])}
    changed = replace(context, engine=engine or {}, model=model)
    return SglangGenerator(SglangGeneratorConfig(max_batch=8, **settings), changed)


def requests_of(samples: int) -> list[SampleRequest]:
    return [
        SampleRequest(ordinal=0, sample=i, seed=i, prompt=Prompt(row=0, text="1+2="))
        for i in range(samples)
    ]


def in_shared_memory() -> set[str]:
    """What this plugin and SGLang keep there."""
    return {
        path.name
        for path in Path("/dev/shm").iterdir()
        if path.name.startswith(("gcore-sglang-", "sglang_loads_"))
    }


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = in_shared_memory()
    yield
    assert in_shared_memory() <= before


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(group: int) -> None:
    until_s = time.monotonic() + 30
    while is_there(group):
        assert time.monotonic() < until_s, "its processes are still there"
        time.sleep(0.05)


@pytest.mark.usefixtures("nothing_left")
def test_a_missing_or_half_written_model_is_reported_before_the_server_starts(
    context: WorkerContext, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="/no/such/model: model directory does not exist"):
        make(context, path="/no/such/model")
    half = tmp_path / "half"
    half.mkdir()
    for file in Path(context.model["path"]).iterdir():
        content = file.read_bytes()
        (half / file.name).write_bytes(
            content[: len(content) // 2] if file.suffix == ".safetensors" else content
        )
    with pytest.raises(DataError, match="model directory is damaged or half written"):
        make(context, path=half)


@pytest.mark.usefixtures("nothing_left")
def test_a_port_in_use_is_reported_before_the_server_starts(context: WorkerContext) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"(?s)roles\.rollout\.engine\.port: port {port} cannot be taken.*in use",
        ):
            make(context, engine={"port": port})
    with pytest.raises(ConfigError, match="port 700000 cannot be taken"):
        make(context, engine={"port": 700_000})


@pytest.mark.usefixtures("nothing_left")
def test_a_misspelt_engine_argument_is_reported(context: WorkerContext) -> None:
    with pytest.raises(
        ConfigError,
        match=r"engine\.mem_fraction_statc: SGLang has no.*did you mean 'mem_fraction_st",
    ):
        make(context, engine={"mem_fraction_statc": 0.5})


@pytest.mark.usefixtures("nothing_left")
def test_a_server_that_starts_too_slowly_is_ended(context: WorkerContext) -> None:
    with pytest.raises(
        DeadlineExceeded,
        match=r"(?s)SGLang did not come up in time.*Raise .*config\.start_timeout_s",
    ):
        make(context, start_timeout_s=1.0)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kind", ["a tensor is missing", "names are peft's", "a weight is NaN"])
def test_weights_that_are_not_the_models_are_refused_before_sglang_loads_them(
    context: WorkerContext, tmp_path: Path, kind: str
) -> None:
    """SGLang itself would start, and sample from what is left."""
    model = make_directory(kind, tmp_path / "model", family="llama")
    with pytest.raises(DataError, match=str(model)) as caught:
        make(context, path=model)
    assert "SGLang" not in str(caught.value)


def test_error_for_a_model_unknown_to_sglang_quotes_its_last_output(
    context: WorkerContext, tmp_path: Path
) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    for file in Path(context.model["path"]).iterdir():
        (unknown / file.name).write_bytes(file.read_bytes())
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(
        json.dumps(config | {"architectures": ["NobodyForCausalLM"]})
    )
    with pytest.raises(
        DataError,
        match=r"(?s)unknown: SGLang does not start with this model.*NobodyForCausalLM.*log",
    ):
        make(context, path=unknown)


@pytest.mark.usefixtures("nothing_left")
def test_a_server_ends_with_its_worker_however_the_worker_ends(
    context: WorkerContext, tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from gcore_core.contract.context import WorkerContext\n"
        "from gcore_sglang.config import SglangGeneratorConfig\n"
        "from gcore_sglang.server import Server\n"
        "context = WorkerContext(role='rollout', directory=sys.argv[1])\n"
        "server = Server({'model_path': sys.argv[2]}, context, threads=1, connections=1)\n"
        "server._launch('key')\n"
        "print(server._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(context.model["path"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        group = int(worker.stdout.readline())
        assert is_there(group)
        worker.send_signal(signal.SIGKILL)
    wait_until_gone(group)


def test_a_killed_server_is_reported_at_once_and_leaves_no_process(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before that: its first port was taken by somebody in the meantime, so it came up on
    another.
    """
    from gcore_sglang import server

    hold, tries = server._hold_port, []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def unlucky(wanted: int | None, role: str) -> socket.socket:
            tries.append(wanted)
            return taken.dup() if len(tries) == 1 else hold(wanted, role)

        monkeypatch.setattr(server, "_hold_port", unlucky)
        generator = make(context, max_new_tokens=64)
    try:
        assert tries == [None, None]
        with held(generator):  # else all may have ended before the signal comes
            generator.submit(requests_of(4))
            generator.step()
            group = generator._server._process.pid
            os.kill(group, signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(
                WorkerDied,
                match=r"(?s)rollout: SGLang ended with exit code -9.*Its log: .*sglang\.log",
            ):
                for _ in range(1000):
                    generator.step()
        keys = [
            (ordinal, sample) for ordinal in range(4) for sample in range(4)
        ]  # some may have ended before
        for verb in (
            lambda: generator.abort(keys),
            lambda: push(generator, read_model(context.model), 1),
        ):
            with pytest.raises(WorkerDied):
                verb()
        assert time.monotonic() - began_s < 20
    finally:
        generator.close()
    wait_until_gone(group)
    assert not generator._server.private.exists()
    generator.close()  # twice does no harm
