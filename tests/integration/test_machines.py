"""The machines that tests of several nodes run on are machines: nothing leaks between them."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.machines import SHELL, Machine, machines

PORT = 5000
#: Sends what it gets, and then how many bytes that were.
SERVER = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as connection:
            n = 0
            while part := connection.recv(65536):
                n += len(part)
            connection.sendall(str(n).encode())
"""


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2, shm_mib=64) as (first, second):
        server = second.start([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        yield first, second
        server.stdout.close()
    server.wait(20)


def test_a_command_runs_on_another_machine(two: tuple[Machine, Machine]) -> None:
    """With its input, its output, its errors and its exit code."""
    first, second = two
    script = "hostname; cat; echo wrong >&2; exit 3"
    words = [*shlex.split(SHELL), second.address, "sh", "-c", script]
    done = first.run(words, input="by input\n", check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("node2\nby input\n", "wrong\n", 3)


def sent(first: Machine, second: Machine, nbytes: int, timeout_s: float = 20) -> float:
    """Sends bytes from one machine to the other; returns the seconds. Raises OSError."""
    with first.network():
        started_s = time.perf_counter()
        with socket.create_connection((second.address, PORT), timeout_s) as client:
            client.sendall(bytes(nbytes))
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == str(nbytes).encode()
        return time.perf_counter() - started_s


def test_they_reach_each_other_and_nobody_else_reaches_them(two: tuple[Machine, Machine]) -> None:
    first, second = two
    sent(first, second, 1000)
    with first.network():
        inside = {name for _, name in socket.if_nameindex()}
    outside = {name for _, name in socket.if_nameindex()}
    assert "eth0" in inside and not outside & {"bridge0", "port1", "port2"}


def test_each_has_its_own_name_memory_and_processes(two: tuple[Machine, Machine]) -> None:
    first, second = two
    assert first.run(["hostname"]).stdout == "node1\n"
    first.run(["touch", "/dev/shm/mine"])
    assert first.run(["ls", "/dev/shm"]).stdout == "mine\n"
    assert second.run(["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/mine").exists()
    assert len(second.processes()) == 1 and "recv" in second.processes()[0]


def test_a_pulled_cable_cuts_and_a_plugged_one_joins(two: tuple[Machine, Machine]) -> None:
    first, second = two
    second.link_down()
    with pytest.raises(OSError):
        sent(first, second, 1, timeout_s=0.5)
    second.link_up()
    sent(first, second, 1)


def test_a_deaf_machine_is_cut_one_way_only(two: tuple[Machine, Machine]) -> None:
    first, second = two
    listen = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.bind(('0.0.0.0', 5001)); s.settimeout(float(sys.argv[1])); print('up', flush=True); "
        "print(s.recv(9))"
    )
    send = "import socket, sys; socket.socket(2, 2).sendto(b'x', (sys.argv[1], 5001))"

    def heard(sender: Machine, receiver: Machine, timeout_s: float) -> bool:
        words = [sys.executable, "-c", listen, str(timeout_s)]
        with receiver.start(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as listener:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "up\n"
            sender.run([sys.executable, "-c", send, receiver.address])
            return listener.stdout.read() == "b'x'\n"

    assert heard(first, second, 20) and heard(second, first, 20)  # so each knows where the other is
    second.deafen()
    assert not heard(first, second, 0.5)
    assert heard(second, first, 20)
    second.mend()
    assert heard(first, second, 20)


def test_a_slow_link_is_slow(two: tuple[Machine, Machine]) -> None:
    """1 MiB takes 1.05 s at 8 Mbit/s, less the 64 kB that the bucket lets through at once."""
    first, second = two
    assert sent(first, second, 1 << 20) < 2
    second.slow(8)
    assert sent(first, second, 1 << 20) > 0.8
    second.mend()


def test_a_far_machine_is_far_both_ways(two: tuple[Machine, Machine]) -> None:
    """To connect takes one way there and back, to send and be answered another."""
    first, second = two
    with second.far(0.1):
        assert sent(first, second, 1000) > 0.4
    sent(first, second, 1000)


def test_nothing_is_left_of_a_killed_test(tmp_path: Path) -> None:
    """The holders end with the pipe of a killed process; so does all that ran on the machines."""
    script = (
        "import sys\nfrom tests.support.machines import machines\n"
        "with machines(1, shm_mib=8) as (one,):\n"
        "    one.start(['sleep', '1000'])\n"
        "    print(one._pid, one._holder.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    ) as test:
        assert test.stdout is not None
        pids = [int(word) for word in test.stdout.readline().split()]
        (started,) = psutil.Process(test.pid).children()[3:]
        watched = [psutil.Process(pid) for pid in (*pids, started.pid)]
        watched += started.children()
        os.kill(test.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(watched, timeout=20)
    assert not alive
