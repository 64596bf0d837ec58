"""Writes a manifest for Kubernetes that runs a job in several pods: ``g-core nodes jobset``.

JobSet is an extension of Kubernetes for jobs of several kinds of pods that belong together. The
manifest has one pod for ``g-core run`` and one for each node, which joins it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_nodes.slurm import count, give
from gcore_nodes.token import TOKEN_VARIABLE

_PROG = "g-core nodes jobset"
#: Kubernetes gives names 63 letters, of which pods of a JobSet need some for their numbers.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_JOIN_PORT = 29399

_MANIFEST = """\
# Runs {file} on {nodes} nodes. Written by `{prog}`; change it as you like.
#
# It needs JobSet in the cluster, a volume claim that all pods may write to, and a token by which the
# nodes prove that they belong to the run. Make the token once:
#
#   kubectl create secret generic {name}-token --from-literal=token="$(openssl rand -hex 32)"
#   kubectl apply -f THIS-FILE
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true          # the nodes find home at {home}
    publishNotReadyAddresses: true
  successPolicy:
    operator: All
    targetReplicatedJobs: [home]      # done when g-core run has ended well
  failurePolicy:
    maxRestarts: {restarts}                    # all pods begin again; the run goes on from its newest checkpoint
  replicatedJobs:
    - name: home                      # g-core run; it has no devices
      replicas: 1
      template:
        spec:
          backoffLimit: 0
          completions: 1
          parallelism: 1
          completionMode: Indexed
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 60     # in which the run saves its state
              containers:
                - name: home
                  image: {image}
                  workingDir: {mount}
                  command:
                    - /bin/bash
                    - -c
                    - |
                      run={run}
                      if compgen -G "$run/checkpoints/step-*" > /dev/null; then
                          exec {python} -m gcore_core resume "$run"
                      fi
                      if [ -e "$run" ]; then mv "$run" "$run.before-$(date +%s)"; fi
                      exec {python} -m gcore_core run {file} \\
                          run.dir="$run" \\
                          launcher.use=nodes/join \\
                          launcher.config.hosts={nodes} \\
                          launcher.config.wait_s={wait_s}{overrides}
                  env: &token
                    - name: {variable}
                      valueFrom:
                        secretKeyRef:
                          name: {name}-token
                          key: token
                  volumeMounts: &mounts
                    - name: shared
                      mountPath: {mount}
                    - name: shm
                      mountPath: /dev/shm
              volumes: &volumes
                - name: shared
                  persistentVolumeClaim:
                    claimName: {claim}
                - name: shm                         # what generators make lies in shared memory
                  emptyDir:
                    medium: Memory
    - name: nodes                     # one pod a node; its agent starts all processes there
      replicas: 1
      template:
        spec:
          backoffLimit: 0
          completions: {nodes}
          parallelism: {nodes}
          completionMode: Indexed
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 60
              containers:
                - name: node
                  image: {image}
                  workingDir: {mount}
                  command: [{python_json}, "-m", "gcore_core", "nodes", "join", "{home}:{port}", "--wait={wait_s}"]
                  env: *token
                  volumeMounts: *mounts
{resources}\
              volumes: *volumes
"""  # noqa: E501
_GPUS = """\
                  resources:
                    limits:
                      nvidia.com/gpu: {gpus}
"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs ``g-core nodes jobset`` with these command-line arguments; returns the exit code.

    Raises ConfigError for a name that Kubernetes does not take, and for a file that cannot be
    written.
    """
    args = _parser().parse_intermixed_args(words)
    give(manifest(args), args.out, _PROG, "its first lines say how it is started")
    return 0


def manifest(args: argparse.Namespace) -> str:
    """Returns the manifest. Raises ConfigError."""
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(args.file).stem.lower()).strip("-")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a JobSet",
            where=f"{_PROG} --name",
            todo="use at most 40 small letters, digits and '-', beginning with a letter",
        )
    overrides = "".join(f" \\\n{' ' * 26}{shlex.quote(word)}" for word in args.overrides)
    return _MANIFEST.format(
        prog=_PROG,
        file=shlex.quote(args.file),
        name=name,
        nodes=args.nodes,
        home=f"{name}-home-0-0.{name}",
        port=_JOIN_PORT,
        restarts=args.restarts,
        image=json.dumps(args.image),
        mount=json.dumps(args.mount),
        run=shlex.quote(f"{args.mount}/runs/{name}"),
        python=shlex.quote(args.python),
        python_json=json.dumps(args.python),
        wait_s=args.wait,
        overrides=overrides,
        variable=TOKEN_VARIABLE,
        claim=json.dumps(args.claim),
        resources=_GPUS.format(gpus=args.gpus_per_node) if args.gpus_per_node else "",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Writes a manifest of a JobSet that runs a job in several pods. Nothing is "
        "applied.",
        epilog="example:\n  g-core nodes jobset job.yaml --image registry/g-core:1 --nodes 4 "
        "--gpus-per-node 8 --claim shared --out job-set.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the job, a YAML file, as pods see it")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    parser.add_argument(
        "--image", required=True, help="with gcore-core, gcore-nodes and the job's plugins"
    )
    parser.add_argument("--nodes", type=count, required=True, metavar="N", help="how many nodes")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="default: none is asked")
    parser.add_argument(
        "--claim",
        required=True,
        metavar="NAME",
        help="a PersistentVolumeClaim that all pods may write to; the run's directory is there",
    )
    parser.add_argument(
        "--mount", default="/shared", metavar="PATH", help="where it is mounted; default: /shared"
    )
    parser.add_argument("--name", help="of the JobSet; default: as the file")
    parser.add_argument("--python", default="python3", help="the interpreter in the image")
    parser.add_argument(
        "--wait",
        type=count,
        default=3600,
        metavar="SECONDS",
        help="for how long pods wait for each other; default: 3600",
    )
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="how often all may begin again"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it; default: printed"
    )
    return parser
