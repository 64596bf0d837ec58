"""What the script for sbatch does, with stand-ins for slurm and for the interpreter.

A real slurm runs it in tests/integration/test_slurm.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from gcore_nodes.slurm import main

from gcore_core.contract.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
#: Writes what it was called with. A run waits for a signal, and ends as one that saved its state.
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then echo token; exit; fi
echo "$@" >> calls
case "$3" in
run | resume) ;;
*) exit ;;
esac
trap 'exit 143' TERM
until grep -q ^srun calls; do sleep 0.02; done
echo > began
if [ -n "$ENDS" ]; then exit "$ENDS"; fi
while :; do sleep 0.02; done
"""
SLURM = {
    "srun": '#!/bin/bash\necho srun "$@" >> calls\n',
    "scontrol": '#!/bin/bash\necho scontrol "$@" >> calls\n'
    '[ "$1" = requeue ] || echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1"\n',
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {"python": PYTHON, **SLURM}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def written(place: Path, *words: str) -> Path:
    script = place / "job.sbatch"
    options = ["--nodes=2", f"--python={place}/python", f"--out={script}"]
    assert main([str(RECIPE), *options, *words]) == 0
    return script


def started(place: Path, script: Path, **variables: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PATH": f"{place}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "n1",
        **variables,
    }
    return subprocess.Popen(["bash", str(script)], cwd=place, env=environment)


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    while not file.exists():
        assert process.poll() is None, "it has ended"


def test_it_starts_one_command_on_every_node_and_the_run(place: Path) -> None:
    override = "run.name=it's $HOME"
    script = written(place, "roles.rollout.slots=1", override, "--cpus-per-task=4")
    process = started(place, script, ENDS="5")
    assert process.wait(60) == 5, "the job's exit code is that of the run"
    (run,) = [call for call in calls(place) if "gcore_core run" in call]
    (srun,) = [call for call in calls(place) if call.startswith("srun")]
    name = "it-s--HOME"
    assert run == (
        f"-m gcore_core run {RECIPE} run.dir=runs/{name}-7 launcher.use=nodes/join "
        "launcher.config.hosts=slurm launcher.config.home=10.0.0.1 "
        "launcher.config.join_port=29399 "
        f"launcher.config.token_file=runs/{name}-7.token roles.rollout.slots=1 {override}"
    )
    assert "--nodes=2 --ntasks-per-node=1 --cpus-per-task=4" in srun
    assert f"nodes join 10.0.0.1:29399 --token-file runs/{name}-7.token" in srun
    assert not any("requeue" in call for call in calls(place))
    assert not list((place / "runs").iterdir()), "the token is still there"


def test_the_token_is_for_its_owner_alone(place: Path) -> None:
    process = started(place, written(place))
    wait_for(place / "began", process)
    (token,) = (place / "runs").iterdir()
    assert token.stat().st_mode & 0o777 == 0o600
    process.terminate()
    process.wait(60)


@pytest.mark.parametrize(
    ("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)]
)
def test_a_signal_saves_and_only_that_of_the_time_limit_queues_again(
    place: Path, number: signal.Signals, is_requeued: bool
) -> None:
    process = started(place, written(place))
    wait_for(place / "began", process)
    process.send_signal(number)
    assert process.wait(60) == 143
    assert ("scontrol requeue 7" in calls(place)) == is_requeued


def test_a_run_that_fails_before_the_time_limit_is_not_queued_again(place: Path) -> None:
    script = written(place)
    (place / "python").write_text(PYTHON.replace("exit 143", "exit 6"))
    process = started(place, script)
    wait_for(place / "began", process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 6
    assert "scontrol requeue 7" not in calls(place)


def test_a_job_that_is_started_again_goes_on_from_a_checkpoint_or_begins_anew(place: Path) -> None:
    script = written(place)
    run = place / "runs" / "quickstart-7"
    (run / "logs").mkdir(parents=True)
    assert started(place, script, ENDS="0", SLURM_RESTART_COUNT="1").wait(60) == 0
    assert f"gcore_core run {RECIPE} run.dir=runs/quickstart-7 " in "\n".join(calls(place))
    assert (place / "runs" / "quickstart-7.before-1" / "logs").exists()
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    assert started(place, script, ENDS="0", SLURM_RESTART_COUNT="2").wait(60) == 0
    resumed = "-m gcore_core resume runs/quickstart-7 launcher.config.home=10.0.0.1"
    assert resumed in calls(place)


def test_what_sbatch_is_told_stands_at_the_top(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes=3", "--gpus-per-node=8", "--time=1-0", "--sbatch=--partition=gpu"]
    assert main([str(RECIPE), *words, "--save-within=90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [shlex.split(line, comments=False)[1] for line in lines if line[:8] == "#SBATCH "]
    assert lines[0] == "#!/bin/bash"
    assert options == [
        *("--job-name=quickstart", "--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=8"),
        *("--time=1-0", "--partition=gpu", f"--chdir={place}", "--output=%x-%j.log"),
        *("--open-mode=append", "--requeue", "--signal=B:USR1@90"),
    ]


def test_a_job_that_cannot_run_is_told_before_it_is_queued(place: Path) -> None:
    with pytest.raises(ConfigError, match="stepz"):
        main([str(RECIPE), "run.stepz=1", "--nodes=2"])
    with pytest.raises(ConfigError) as error:
        main([str(RECIPE), "--nodes=2", f"--out={place}/none/job.sbatch"])
    assert error.value.what == "the file cannot be written: No such file or directory"


@pytest.mark.parametrize("name", ["my runs", 'a "b" \\ #c', "it's"])
def test_a_directory_of_any_name_is_one_word_to_slurm(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = place / name
    directory.mkdir()
    monkeypatch.chdir(directory)
    script = directory / "job.sbatch"
    assert main([str(RECIPE), "--nodes=2", f"--python={place}/python", f"--out={script}"]) == 0
    lines = script.read_text().splitlines()
    words = [shlex.split(line)[1:] for line in lines if "--chdir" in line]
    assert words == [[f"--chdir={directory}"]]
    assert f"#   sbatch {shlex.quote(str(script))}" in lines
    process = started(place, script, ENDS="0")
    assert process.wait(60) == 0
