"""Writes a script for sbatch that runs a job on several nodes: ``g-core nodes slurm``.

The script is made to be read and changed: it says what each part is for, and calls nothing but
slurm and g-core.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import load_plan

_PROG = "g-core nodes slurm"

#: {{...}} stands for one brace in the script.
_SCRIPT = """\
#!/bin/bash
# Runs {job} on {n_nodes}. Written by `{command}`;
# change it as you like.
#
#   sbatch {script}
#   scancel --batch --signal=TERM JOB    save the run's state, and end it
#   scancel JOB                          end it now
#
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1             # one join command a node; it starts all processes there
{options}\
#SBATCH {chdir}
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append              # a job that is requeued goes on in the same file
#SBATCH --requeue                       # slurm may start it again, as when a node has failed
#SBATCH --signal=B:USR1@{save_s}           # {save_s} s before the time limit this script gets USR1

python={python}
run={run}-$SLURM_JOB_ID                 # a job that is requeued has the same number
token=$run.token

# Nodes prove by this token that they belong to the run. You alone may read it.
mkdir -p "$(dirname "$run")"
(umask 077 && "$python" -c 'import secrets; print(secrets.token_hex())' > "$token") || exit 2
trap 'rm -f "$token"' EXIT

# The address by which slurm itself reaches this node, the first one of the job.
home=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\\([^ ]*\\).*/\\1/')

# On every node, this one too: its agent starts the processes of the run there, and ends with it.
# One node that ends must not end the others: the run decides what happens then.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 {srun_options}\\
    --kill-on-bad-exit=0 --wait=0 --mpi=none --cpu-bind=none \\
    "$python" -m gcore_core nodes join "$home:{join_port}" --token-file "$token" --again 20 &
nodes=$!

# The run itself. A job that slurm has started again goes on from the newest checkpoint, maybe on
# other nodes.
if compgen -G "$run/checkpoints/step-*" > /dev/null; then
    "$python" -m gcore_core resume "$run" launcher.config.home="$home" &
else
    if [ -e "$run" ]; then mv "$run" "$run.before-${{SLURM_RESTART_COUNT:-0}}"; fi
    "$python" -m gcore_core run {job} \\
        run.dir="$run" \\
        launcher.use=nodes/join \\
        launcher.config.hosts=slurm \\
        launcher.config.home="$home" \\
        launcher.config.join_port={join_port} \\
        launcher.config.token_file="$token"{overrides} &
fi
supervisor=$!

# USR1: the time limit is near. The run saves its state and ends, and the job is queued again.
# TERM: somebody ends the job. The run saves its state, and the job is not queued again.
requeue=no
trap 'signalled=yes requeue=yes; kill -TERM "$supervisor"' USR1
trap 'signalled=yes; kill -TERM "$supervisor"' TERM
signalled=yes
while [ "$signalled" = yes ]; do        # a signal interrupts the wait
    signalled=no
    wait "$supervisor"
    code=$?
done

kill -TERM "$nodes" 2> /dev/null        # they end with the run by themselves, unless one hangs
wait "$nodes"

if [ "$requeue" = yes ] && [ "$code" = 143 ]; then      # 143: ended by SIGTERM, state saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs ``g-core nodes slurm`` with these command-line arguments; returns the exit code.

    Raises ConfigError for a job that cannot run, and for a file that cannot be written.
    """
    args = _parser().parse_intermixed_args(words)
    plan = load_plan(args.file, [*args.overrides, *_launcher(args)])
    text = script(args, plan.name)
    give(text, args.out, _PROG, f"submit it with: sbatch {shlex.quote(str(args.out))}")
    return 0


def _launcher(args: argparse.Namespace) -> list[str]:
    """Returns the overrides that the script gives, as far as they are known now."""
    return ["launcher.use=nodes/join", f"launcher.config.hosts={args.nodes}"]


def script(args: argparse.Namespace, name: str) -> str:
    """Returns the script.

    name: of the run.
    """
    options = []
    srun_options = ""
    if args.gpus_per_node:
        options.append(f"--gpus-per-node={args.gpus_per_node}")
    if args.cpus_per_task:
        options.append(f"--cpus-per-task={args.cpus_per_task}")
        # Since slurm 22.05 srun does not take it from the job.
        srun_options = f"--cpus-per-task={args.cpus_per_task} "
    if args.time:
        options.append(f"--time={args.time}")
    options += args.sbatch
    overrides = "".join(f" \\\n        {shlex.quote(word)}" for word in args.overrides)
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return _SCRIPT.format(
        job=shlex.quote(str(args.file)),
        n_nodes="one node" if args.nodes == 1 else f"{args.nodes} nodes",
        command=f"{_PROG} {shlex.quote(str(args.file))}",
        script=shlex.quote(str(args.out)) if args.out else "THIS-FILE",
        name=name,
        chdir=_as_one_word(f"--chdir={os.getcwd()}"),
        nodes=args.nodes,
        options="".join(f"#SBATCH {option}\n" for option in options),
        srun_options=srun_options,
        save_s=args.save_within,
        python=shlex.quote(args.python),
        run=shlex.quote(f"{args.runs}/{name}"),
        join_port=args.join_port,
        overrides=overrides,
    )


def _as_one_word(option: str) -> str:
    """Quotes an option for a line ``#SBATCH`` where that is needed.

    Slurm reads such a line by itself, with double quotes and backslashes as a shell does.
    """
    if shlex.quote(option) == option:
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def give(text: str, path: Path | None, where: str, hint: str) -> None:
    """Writes a text to a file and says so, or prints it where there is none.

    where: the command that writes it, for the error.
    hint: what to do with the file.
    Raises ConfigError when the file cannot be written.
    """
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}",
            where=f"{where} --out {path}",
            todo="name a file in a directory that you may write to",
        ) from error
    print(f"{path} is written; {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Writes a script for sbatch that runs a job on several nodes. The job is "
        "checked first; nothing is submitted.",
        epilog="example:\n  g-core nodes slurm job.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00"
        " --out job.sbatch\n  sbatch job.sbatch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    parser.add_argument("--nodes", type=count, required=True, metavar="N", help="how many nodes")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="default: none is asked")
    parser.add_argument("--cpus-per-task", type=count, metavar="N", help="CPU cores of each node")
    parser.add_argument("--time", metavar="LIMIT", help="time limit, as sbatch takes it")
    parser.add_argument(
        "--save-within",
        type=count,
        default=120,
        metavar="SECONDS",
        help="so long before the time limit the run saves its state and is queued again; "
        "default: 120",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option for sbatch, such as --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter on the nodes; default: this one"
    )
    parser.add_argument(
        "--runs", default="runs", metavar="DIR", help="where the run's directory is made"
    )
    parser.add_argument(
        "--join-port", type=count, default=29399, metavar="PORT", help="default: 29399"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it; default: printed"
    )
    return parser


def count(text: str) -> int:
    """Reads a number of at least one. Raises ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number
