"""Runs a real slurm on machines of ``tests.support.machines``, all of it as Debian packs it.

One slurmctld on the first machine, a slurmd on each, and a munged for all, which they reach by its
socket. Nothing of the system's own slurm is touched: settings, keys, states and logs are in one
directory of the test, and all ends with the test.

    with machines(2) as (first, second), slurm([first, second], directory) as cluster:
        job = cluster.submit("job.sh")
        cluster.wait(job)

It *fails* where slurm is missing (Debian: ``apt-get install -y slurm-wlm munge``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.machines import Machine

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue")
_START_S = 60.0
_CPUS = 8  # of each node, as slurm believes
_CONFIG = """
ClusterName=test
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait={kill_wait_s}
MinJobAge=600
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A slurm that runs.

    head: the machine on which jobs are submitted.
    environment: of its commands.
    """

    head: Machine
    environment: dict[str, str]

    def call(self, *words: str, cwd: Path | None = None) -> str:
        """Runs a command of slurm, and returns what it prints. Raises CalledProcessError."""
        return self.head.run(list(words), env=self.environment, cwd=cwd).stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """Submits a job from the directory of its script; returns its number."""
        words = ["sbatch", "--parsable", *options, str(script)]
        return self.call(*words, cwd=script.parent)

    def state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING or COMPLETED."""
        return self.facts(job)["JobState"]

    def facts(self, job: str) -> dict[str, str]:
        """Returns what slurm knows of a job."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, within_s: float = 600) -> dict[str, str]:
        """Waits until a job is in one of the states, or has ended; returns what slurm knows."""
        ends = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_until(lambda: self.state(job) in (states or ends), within_s)
        return self.facts(job)


@contextlib.contextmanager
def slurm(
    machines: Sequence[Machine], directory: Path, *, kill_wait_s: int = 30
) -> Iterator[Slurm]:
    """Starts slurm on machines, and ends it after the block.

    directory: of the test; its path must be short enough for a socket.
    kill_wait_s: a job that is cancelled has so long between SIGTERM and SIGKILL.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"slurm is not installed ({', '.join(missing)}): apt-get install -y slurm-wlm munge"
        )
    directory.mkdir(parents=True, exist_ok=True)
    first = machines[0]
    (directory / "state").mkdir()
    for machine in machines:
        (directory / f"spool.{machine.name}").mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    config = directory / "slurm.conf"
    nodes = "\n".join(
        f"NodeName={machine.name} NodeAddr={machine.address} CPUs={_CPUS}" for machine in machines
    )
    names = ",".join(machine.name for machine in machines)
    config.write_text(
        _CONFIG.format(
            first=first, directory=directory, nodes=nodes, names=names, kill_wait_s=kill_wait_s
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(config)}
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str, machine: Machine | None = None) -> None:
            log = stack.enter_context(open(directory / f"{name}.log", "wb"))
            command = list(words) if machine is None else machine.command(words)
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            stack.callback(_end, process)

        here = directory
        files = ("socket", "pid", "log", "seed")
        words = [f"--{name}-file={here}/munge.{name}" for name in files if name != "socket"]
        start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={here}/munge.socket", *words),
        )
        wait_until((here / "munge.socket").exists, _START_S)
        start("slurmctld", "slurmctld", "-D", "-f", str(config), machine=first)
        for machine in machines:
            words = ["slurmd", "-D", "-f", str(config), "-N", machine.name]
            start(f"slurmd.{machine.name}", *words, machine=machine)
        cluster = Slurm(first, environment)
        idle = f"idle {len(machines)}"

        def is_up() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError):
                return idle in cluster.call("sinfo", "-h", "-o", "%T %D").splitlines()
            return False

        wait_until(is_up, _START_S)
        try:
            yield cluster
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                cluster.call("scancel", "--user=root")


def wait_until(holds: Callable[[], bool], within_s: float) -> None:
    """Waits until something holds. Raises TimeoutError when it does not come to hold."""
    until_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"it does not hold after {within_s:g} s")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a daemon; one in a machine ends with that."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
