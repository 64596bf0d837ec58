"""The manifest is one that JobSet and Kubernetes take, as far as that can be said without them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_nodes.jobset import main
from gcore_nodes.join import _parser as join_parser

from gcore_core.contract.errors import ConfigError

#: Fields of jobset.x-k8s.io/v1alpha2, of batch/v1 and of v1 that a manifest may have, by their
#: published reference: a type, a list of one kind, or the fields of an object.
_POD = {
    "restartPolicy": {"Never", "OnFailure"},
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": str,
            "image": str,
            "workingDir": str,
            "command": [str],
            "env": [
                {"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}},
            ],
            "volumeMounts": [{"name": str, "mountPath": str}],
            "resources": {"limits": {"nvidia.com/gpu": int}},
        }
    ],
    "volumes": [
        {
            "name": str,
            "persistentVolumeClaim": {"claimName": str},
            "emptyDir": {"medium": {"", "Memory"}},
        }
    ],
}
_JOB = {
    "backoffLimit": int,
    "completions": int,
    "parallelism": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "template": {"spec": _POD},
}
_JOB_SET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": [str]},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": _JOB}}],
    },
}
WORDS = ["job.yaml", "--image=registry/g-core:1", "--nodes=3", "--claim=shared"]


def check(content: Any, fields: Any, where: str = "") -> None:
    """Holds content to fields. Raises AssertionError, naming the place."""
    if isinstance(fields, dict):
        assert isinstance(content, dict), where
        for name, part in content.items():
            assert name in fields, f"{where}.{name} is no field"
            check(part, fields[name], f"{where}.{name}")
    elif isinstance(fields, list):
        assert isinstance(content, list) and content, where
        for index, part in enumerate(content):
            check(part, fields[0], f"{where}[{index}]")
    elif isinstance(fields, set):
        assert content in fields, where
    else:
        assert type(content) is fields, where


def written(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*WORDS, *words]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


def pods(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the pods' specifications by the name of their job."""
    jobs = content["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}


def test_every_field_is_one_of_the_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    content = written(capsys, "--gpus-per-node=8")
    check(content, _JOB_SET)
    content["spec"]["replicatedJobs"][1]["template"]["spec"]["parallel"] = 3
    with pytest.raises(AssertionError, match=r"\[1\].template.spec.parallel is no field"):
        check(content, _JOB_SET)


def test_its_parts_fit_together(capsys: pytest.CaptureFixture[str]) -> None:
    content = written(capsys, "--gpus-per-node=8", "--wait=60")
    name = content["metadata"]["name"]
    nodes = content["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert content["spec"]["successPolicy"]["targetReplicatedJobs"] == ["home"]
    assert nodes["completions"] == nodes["parallelism"] == 3
    for pod in pods(content).values():
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        (token,) = container["env"]
        assert token["name"] == "G_CORE_JOIN_TOKEN"
        assert token["valueFrom"]["secretKeyRef"] == {"name": f"{name}-token", "key": "token"}
    command = pods(content)["nodes"]["containers"][0]["command"]
    assert command[:5] == ["python3", "-m", "gcore_core", "nodes", "join"]
    # <JobSet>-<replicated job>-<its number>-<pod's number>.<subdomain, by default the JobSet>
    assert join_parser().parse_args(command[5:]).address == f"{name}-home-0-0.{name}:29399"
    assert pods(content)["nodes"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "resources" not in pods(content)["home"]["containers"][0]


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_home_runs_the_job_or_goes_on_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, has_checkpoint: bool
) -> None:
    override = "run.name=it's $HOME"
    content = written(capsys, override, f"--mount={tmp_path}", "--python=./python")
    container = pods(content)["home"]["containers"][0]
    assert container["workingDir"] == str(tmp_path)
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    (tmp_path / "python").chmod(0o755)
    run = tmp_path / "runs" / "job"
    if has_checkpoint:
        (run / "checkpoints" / "step-000001").mkdir(parents=True)
    done = subprocess.run(
        container["command"], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    expected = f"-m gcore_core resume {run}\n"
    if not has_checkpoint:
        expected = (
            f"-m gcore_core run job.yaml run.dir={run} launcher.use=nodes/join "
            f"launcher.config.hosts=3 launcher.config.wait_s=3600 {override}\n"
        )
    assert (done.stdout, done.stderr) == (expected, ""), shlex.join(container["command"])


def test_a_name_that_kubernetes_does_not_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert written(capsys, "--name=a-b-1")["metadata"]["name"] == "a-b-1"
    for name in ("A", "-a", "a-", "1a", "a" * 41, "a_b"):
        with pytest.raises(ConfigError, match="cannot name a JobSet"):
            main([*WORDS, f"--name={name}"])
    assert main(["My Job_1.yaml", *WORDS[1:], f"--out={tmp_path}/set.yaml"]) == 0
    assert yaml.safe_load((tmp_path / "set.yaml").read_text())["metadata"]["name"] == "my-job-1"
