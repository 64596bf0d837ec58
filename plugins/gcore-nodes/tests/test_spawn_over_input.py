"""A process that is started by its standard input reads its spec there, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from gcore_nodes.spawn_over_input import spawn_over_input

from gcore_core.kits.wire import framed

SECRET = b"a secret that nobody shows"
#: Says that it has its spec, waits for the end of its lifeline, and says that too.
CHILD = """
import os, select, sys
import msgspec
from gcore_core.kits.launching import read_spec
class Spec(msgspec.Struct):
    name: str
    secret: bytes
spec, lifeline = read_spec("a test", Spec)
print("spec", spec.name, len(spec.secret), flush=True)
select.select([lifeline], [], [])
print("ended", os.read(lifeline, 1), flush=True)
"""


class Spec(msgspec.Struct):
    name: str
    secret: bytes


def words() -> list[str]:
    return [sys.executable, "-c", CHILD]


def told(given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Runs the child with an input that ends."""
    return subprocess.run([*words(), "--stdin"], input=given, capture_output=True, timeout=60)


def encoded(spec: Spec) -> bytes:
    content = msgspec.msgpack.encode(spec)
    return framed(content)


async def line_of(log: Path, start: str) -> None:
    async with asyncio.timeout(60):
        while not any(line.startswith(start) for line in log.read_text().splitlines()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("nbytes", [10, 3_000_000], ids=["short", "longer than a pipe"])
async def test_the_spec_comes_by_input_and_its_end_is_the_lifeline(
    tmp_path: Path, nbytes: int
) -> None:
    log = tmp_path / "log"
    process = await spawn_over_input(words(), Spec("one", bytes(nbytes)), log)
    await line_of(log, f"spec one {nbytes}")
    assert process.stdin is not None
    process.stdin.write(b"noise")  # such as what a person types
    await process.stdin.drain()
    assert process.returncode is None and "ended" not in log.read_text()
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert log.read_text().splitlines()[-1] == "ended b''"


async def test_the_secret_is_in_no_argument_and_no_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await spawn_over_input(words(), Spec("one", SECRET), log)
    await line_of(log, "spec")
    for name in ("cmdline", "environ"):
        content = Path(f"/proc/{process.pid}/{name}").read_bytes()
        assert content and SECRET not in content
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    assert SECRET.decode() not in log.read_text()


async def test_a_process_that_is_stopped_is_woken_by_the_end_of_its_input(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await spawn_over_input(words(), Spec("one", b""), log)
    await line_of(log, "spec")
    os.kill(process.pid, signal.SIGSTOP)
    assert process.stdin is not None
    process.stdin.close()
    try:
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_a_command_that_ends_at_once_is_no_error(tmp_path: Path) -> None:
    spec = Spec("one", bytes(3_000_000))
    process = await spawn_over_input(["sh", "-c", "echo no >&2; exit 7"], spec, tmp_path / "log")
    assert await process.wait() == 7
    assert (tmp_path / "log").read_text() == "no\n"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (b"", "standard input ended after 0 of 4 bytes of the spec"),
        (encoded(Spec("one", b"x"))[:-3], "standard input ended after"),
        (b"Welcome to node2!", "standard input does not begin with a spec"),
        (framed(b"\xffabc"), "spec"),
    ],
)
def test_an_input_that_is_no_spec_is_told(given: bytes, what: str) -> None:
    done = told(given)
    assert done.returncode == 1
    assert what in done.stderr.decode()


def test_one_of_the_two_ways_is_needed() -> None:
    done = subprocess.run(words(), capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 2
    assert b"--fd and --lifeline are needed, or else --stdin" in done.stderr
