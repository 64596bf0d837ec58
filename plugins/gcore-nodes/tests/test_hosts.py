"""Lists of hosts are read as their writers mean them, and a wrong one is told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_nodes.hosts import Host, expand, find_hosts

from gcore_core.contract.errors import ConfigError


def names(hosts: list[Host]) -> list[str]:
    return [host.name for host in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[01-03,07],x5", "n01 n02 n03 n07 x5"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("n[1,3]-ib", "n1-ib n3-ib"),
        ("a[1],b[2-3].site,c", "a1 b2.site b3.site c"),
        ("gpu-[1-2],cpu-node", "gpu-1 gpu-2 cpu-node"),
    ],
)
def test_slurm_lists(text: str, expected: str) -> None:
    assert expand(text) == expected.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n[1-3", "a bracket that is not closed, at character 2"),
        ("n1]", "a bracket, at character 3"),
        ("n[[1]]", "a bracket, at character 3"),
        ("n[]", "'' is no range of numbers, at character 3"),
        ("n[1,a]", "'a' is no range of numbers, at character 5"),
        ("n[1-]", "'1-' is no range of numbers, at character 3"),
        ("n[3-1]", "'3-1' runs backwards, at character 3"),
        ("n1,,n2", "a host is missing, at character 4"),
        ("n[0-99999999]", "more than 65536 hosts, at character 3"),
        ("a[0-999]b[0-999]", "more than 65536 hosts, at character 11"),
    ],
)
def test_malformed_slurm_lists(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand(text)
    assert error.value.where == "SLURM_JOB_NODELIST"
    assert error.value.why == f"{why} of {text!r}"
    assert "scontrol" in error.value.todo


def test_the_hosts_of_a_slurm_job() -> None:
    assert names(find_hosts("slurm", {"SLURM_JOB_NODELIST": "n[1-2]"})) == ["n1", "n2"]
    assert names(find_hosts("slurm", {"SLURM_NODELIST": "old"})) == ["old"]
    with pytest.raises(ConfigError, match="no slurm job") as error:
        find_hosts("slurm", {})
    assert "salloc" in error.value.todo


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# a cluster\n\nn1\nn2 slots=4   # half of it\n  n3 slots=2 max_slots=8\nn4:8\nme@n5\n"
    )
    assert find_hosts(str(path)) == [
        Host("n1"),
        Host("n2", 4),
        Host("n3", 2),
        Host("n4", 8),
        Host("me@n5"),
    ]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("n1\nn2 gpus=4\n", ":2", "'gpus=4' is not understood"),
        ("n1 slots=many\n", ":1", "'slots=many' is not understood"),
        ("n1 slots=0\n", ":1", "n1 has no slots"),
        ("# nothing\n", "", "no host is named"),
        ("n1\nn2\nn1\n", "", "n1 is named 2 times"),
        ("-oProxyCommand=evil\n", "", "'-oProxyCommand=evil' is no host's name"),
        ("n1;reboot\n", "", "'n1;reboot' is no host's name"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        find_hosts(str(path))
    assert what in error.value.what
    assert error.value.where == f"{path}{where}"
    assert error.value.todo


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as error:
        find_hosts(str(tmp_path / "none"))
    assert "slurm" in error.value.todo
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
        find_hosts(str(tmp_path / "binary"))


def test_a_list_keeps_its_order_and_names_each_host_once() -> None:
    assert names(find_hosts(["b", "a", "10.0.0.1", "fd00::1"])) == ["b", "a", "10.0.0.1", "fd00::1"]
    with pytest.raises(ConfigError, match="a is named 2 times"):
        find_hosts(["a", "b", "a"])
    with pytest.raises(ConfigError, match="no host is named"):
        find_hosts([])
