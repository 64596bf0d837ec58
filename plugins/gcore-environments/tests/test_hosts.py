"""Processes of environments: what one episode does harms no other, and nothing is left behind."""

from __future__ import annotations

import json
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_environments import sandbox
from gcore_environments.checks import host_problems
from gcore_environments.hosts import Host, Hosts, HostSettings

from gcore_core.contract.errors import ConfigError

pytestmark = pytest.mark.rest

FILE = Path(__file__).with_name("unruly.py")
ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "api_key": "key"}
PATIENCE_S = 60.0


class Parent:
    """Has hosts, and hears what they say."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.host = hosts.of((0, 0))

    def hear(self) -> dict[str, Any]:
        while True:
            host, message = self.hosts.replies.get(timeout=PATIENCE_S)
            if self.hosts.is_current(host):
                return message

    def says_nothing(self) -> bool:
        """Whether nothing has come, once the host has answered a question behind all else."""
        self.host.send(op="who", id=[99, 0])
        return self.hear() == {"late": [99, 0], "current": None}

    def open(self, ordinal: int = 1, /, seed: int = 0, **row: Any) -> None:
        host = self.hosts.of((ordinal, 0))
        row = {"prompt": "", "messages": [], "name": ordinal, **row}
        host.send(op="open", id=[ordinal, 0], seed=seed, row=row, endpoint=ENDPOINT)

    def step(self, ordinal: int = 1, turn: int = 1, text: str = "") -> None:
        told = {"text": text, "calls": [], "status": "finished", "reasoning": "", "player": ""}
        self.hosts.of((ordinal, 0)).send(op="step", id=[ordinal, 0], turn=turn, **told)

    def tell(self, op: str, ordinal: int = 1) -> None:
        self.hosts.of((ordinal, 0)).send(op=op, id=[ordinal, 0])


Started = Callable[..., Parent]


@pytest.fixture
def start() -> Iterator[Started]:
    """Starts hosts and hears that they are ready; ends them at last, so that none is left."""
    parents: list[Parent] = []

    def started(name: str = "Unruly", /, ready: bool = True, **settings: Any) -> Parent:
        settings.setdefault("environment", f"{FILE}:{name}")
        parent = Parent(Hosts(HostSettings(**settings)))
        parents.append(parent)
        for _ in range(settings.get("number", 1) if ready else 0):
            assert parent.hear()["ready"]
        return parent

    yield started
    for parent in parents:
        hosts = list(parent.hosts._hosts)
        parent.hosts.close()
        assert not any(_lives(host.process.pid) for host in hosts)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(is_so: Callable[[], bool], what: str) -> None:
    """Looks again and again whether something is so. Fails where it is not after a long time."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"not so: {what}"
        select.select([], [], [], 0.005)


# -- turns -----------------------------------------------------------------------------------------


def test_an_episode_goes_on_turn_by_turn(start: Started) -> None:
    parent = start()
    parent.open(5, prompt="Zählen 漢字 \ud800 ")
    assert (first := parent.hear())["id"] == [5, 0]
    assert first["turn"] == 0
    assert first["messages"][0]["content"].startswith("Zählen 漢字 \ud800 ")
    for turn in range(1, 4):
        parent.step(5, turn, text=f"turn {turn} é\u2028")
        said = parent.hear()
        assert (said["turn"], said["messages"][0]["content"]) == (turn, f"turn {turn} é\u2028")


def test_a_thousand_turns_take_no_more_than_seconds(start: Started) -> None:
    parent = start()
    parent.open()
    parent.hear()
    began = time.monotonic()
    for turn in range(1, 1001):
        parent.step(turn=turn)
        assert parent.hear()["turn"] == turn
    assert time.monotonic() - began < 20


def test_two_hundred_episodes_of_one_host_are_played_at_once(start: Started) -> None:
    parent = start()
    for ordinal in range(200):
        parent.open(ordinal)
    assert {parent.hear()["id"][0] for _ in range(200)} == set(range(200))
    for turn in range(1, 4):
        for ordinal in range(200):
            parent.step(ordinal, turn, text=f"{ordinal}.{turn}")
        said = [parent.hear() for _ in range(200)]
        texts = {(one["id"][0], one["messages"][0]["content"]) for one in said}
        assert texts == {(ordinal, f"{ordinal}.{turn}") for ordinal in range(200)}


def test_a_message_may_be_far_larger_than_a_pipe(start: Started) -> None:
    parent = start()
    parent.open(step="big")
    parent.hear()
    text = "é" * (4 << 20)
    parent.step(text=text)
    assert parent.hear()["messages"][0]["content"] == text * 2


def test_episodes_that_run_at_once_are_seeded_apart(start: Started) -> None:
    parent = start("Seeded")
    for ordinal in range(8):
        parent.open(ordinal, seed=ordinal)
    said = {one["id"][0]: one["messages"][0]["content"] for one in (parent.hear() for _ in "x" * 8)}
    assert said == {ordinal: str(random.Random(ordinal).random()) for ordinal in range(8)}


def test_a_program_gets_the_endpoint_and_gives_rewards(start: Started) -> None:
    parent = Parent(start("Asking").hosts)
    parent.open(1)
    said = parent.hear()
    assert said["done"] is True
    assert said["rewards"] == {"policy": float(len(ENDPOINT["base_url"]))}
    parent.open(2, gives="text")
    assert "Asking.run: rewards must be a dict" in parent.hear()["error"]


def test_a_hundred_agents_that_block_are_played_at_once(start: Started, tmp_path: Path) -> None:
    """Each waits in its thread until all others are there, too."""
    (tmp_path / "blocking.py").write_text(
        "import asyncio, threading\n"
        "MEETING = threading.Barrier(100, timeout=30)\n"
        "class Agent:\n"
        "    async def run(self, row, seed, endpoint):\n"
        "        await asyncio.to_thread(MEETING.wait)\n"
        "        return {'met': 1.0}\n"
    )
    parent = start("blocking.py:Agent", environment=f"{tmp_path}/blocking.py:Agent")
    for ordinal in range(100):
        parent.open(ordinal)
    assert all(parent.hear()["rewards"] == {"met": 1.0} for _ in range(100))


def test_what_an_environment_prints_is_no_message(
    start: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = start()
    parent.open(reset="talk")
    assert parent.hear()["messages"][0]["content"] == "input: ''"
    assert parent.says_nothing()
    captured = capfd.readouterr()
    assert {"a print", "a child"} <= set(captured.err.splitlines())
    assert "a print" not in captured.out


# -- what goes wrong in an episode -----------------------------------------------------------------


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("does", "said"),
    [("fail", "LookupError: no such move: ünmöglich"), ("leave", "SystemExit: 3")],
)
def test_what_an_environment_raises_is_said_of_its_episode_alone(
    start: Started, tmp_path: Path, where: str, does: str, said: str
) -> None:
    parent = start(config={"marks": str(tmp_path)})
    row: dict[str, Any] = {where: does}
    parent.open(1, **row)
    parent.open(2)
    messages = [parent.hear(), parent.hear()]
    if where == "step":
        parent.step()
        messages = [parent.hear()]
    (error,) = (one for one in messages if "error" in one)
    assert error["id"] == [1, 0]
    assert error["turn"] == int(where == "step")
    assert error["error"].startswith(f"{where}: {said} ({FILE}, line ")
    assert "Traceback" in error["trace"]
    until((tmp_path / "closed.1").exists, "the episode that failed is closed")
    parent.step(2, text="goes on")
    assert parent.hear()["messages"][0]["content"] == "goes on"


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("none", "Unruly.step returned None, not an Observation"),
        ("text", "Unruly.step returned a str, not an Observation"),
        ("dict", "Unruly.step returned a dict, not an Observation"),
        ("role", "Unruly.step: a message has no role: {'content': 'x'}"),
        ("content", "Unruly.step: content of a message must be a str or a list of parts, is None"),
        ("number", "Unruly.step: content of a message must be a str or a list of parts, is a int"),
        ("nothing", "Unruly.step returned no messages, so the policy is told nothing; give mess"),
        ("done", "Unruly.step: done must be a bool, is a str"),
        ("messages", "Unruly.step: messages must be a list of dicts, is 'hello'"),
        ("nan", "Unruly.step: reward 'right' must be finite, is nan"),
        ("reward", "Unruly.step: reward 'right' must be a number, is a str"),
        ("object", "Unruly.step: content of a message must be a str or a list of parts, is a obj"),
        ("player", "Unruly.step: player must be a str, is a int"),
    ],
)
def test_what_is_no_observation_is_an_error_of_the_episode(
    start: Started, gives: str, said: str
) -> None:
    parent = start()
    parent.open(step="give", gives=gives)
    parent.hear()
    parent.step()
    error = parent.hear()["error"]
    assert error.startswith("step: ")
    assert said in error
    assert "host.py" not in error, "the place where a fault was found is not where it is"


@pytest.mark.parametrize("op", ["cancel", "close"])
def test_an_episode_that_awaits_for_ever_is_ended_alone_and_closed(
    start: Started, tmp_path: Path, op: str
) -> None:
    parent = start(config={"marks": str(tmp_path)})
    parent.open(1, step="wait")
    parent.open(2)
    parent.hear()
    parent.hear()
    parent.step(1)
    until((tmp_path / "waits").exists, "it awaits")
    parent.tell("who")
    assert parent.hear() == {"late": [1, 0], "current": None}
    parent.tell(op)
    until((tmp_path / "closed.1").exists, "the cancelled episode is closed")
    assert parent.says_nothing()
    assert not (tmp_path / "closed.2").exists()
    parent.open(1)
    assert parent.hear()["id"] == [1, 0]


def test_an_episode_that_refuses_to_end_says_nothing_more(start: Started, tmp_path: Path) -> None:
    parent = start(config={"marks": str(tmp_path)})
    parent.open(reset="wait_stubbornly")
    until((tmp_path / "waits").exists, "it awaits")
    parent.tell("cancel")
    until((tmp_path / "refused").exists, "it refuses")
    assert parent.says_nothing()


@pytest.mark.parametrize("does", ["fail", "wait"])
def test_a_close_that_fails_or_hangs_holds_nobody(
    start: Started, tmp_path: Path, does: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = start(config={"marks": str(tmp_path)}, turn_s=0.05)
    parent.open(1, close=does)
    parent.hear()
    parent.tell("close")
    said = {"fail": "no such move", "wait": "TimeoutError"}[does]
    shown: list[str] = []

    def tells() -> bool:
        shown.append(capfd.readouterr().err)
        return said in "".join(shown)

    until(tells, "the log says why it was not closed")
    parent.open(1)
    assert parent.hear()["id"] == [1, 0]


def test_a_message_for_an_episode_that_is_over_is_nothing(start: Started) -> None:
    parent = start()
    for op in ("close", "cancel"):
        parent.tell(op, 7)
    parent.step(7)
    assert parent.says_nothing()


# -- processes that hang or die --------------------------------------------------------------------


@pytest.mark.parametrize("does", ["loop", "loop_in_child"])
def test_a_host_says_which_episode_holds_its_loop(
    start: Started, tmp_path: Path, does: str
) -> None:
    parent = start(config={"marks": str(tmp_path)})
    parent.open(1, step=does)
    parent.open(2)
    parent.hear()
    parent.hear()
    parent.step(1)
    until((tmp_path / "loops").exists, "it loops")
    parent.step(2)
    parent.tell("who", 2)
    assert parent.hear() == {"late": [2, 0], "current": "episode:1.0"}
    parent.hosts.replace(parent.host)
    assert parent.hear()["ready"]
    parent.open(2)
    assert parent.hear()["id"] == [2, 0]
    assert parent.hosts.restarts == 1


def test_a_host_that_runs_no_thread_is_killed(start: Started, tmp_path: Path) -> None:
    parent = start(config={"marks": str(tmp_path)})
    parent.open(step="hold")
    parent.hear()
    parent.step()
    until((tmp_path / "holds").exists, "it holds the interpreter")
    parent.tell("who")
    with pytest.raises(queue.Empty):
        parent.hosts.replies.get(timeout=1.0)
    parent.hosts.replace(parent.host)
    assert parent.hear()["ready"]


@pytest.mark.parametrize(
    ("does", "said"),
    [("die", "its process was killed by SIGKILL"), ("end", "its process ended with exit code 7")],
)
def test_a_lost_host_says_how_it_ended_and_is_replaced(
    start: Started, does: str, said: str
) -> None:
    parent = start(number=2)
    parent.open(2, reset=does)
    assert parent.hear() == {"lost": True, "error": said}
    lost = parent.hosts.of((2, 0))
    lost.send(op="close", id=[2, 0])
    parent.hosts.replace(lost)
    parent.hosts.replace(lost)
    assert parent.hear()["ready"]
    assert not parent.hosts.is_current(lost)
    assert parent.hosts.restarts == 1
    parent.open(2)
    parent.open(3)
    assert {parent.hear()["id"][0] for _ in range(2)} == {2, 3}


def _says(monkeypatch: pytest.MonkeyPatch, *lines: str, has_door: bool = False) -> None:
    """Has a program in the host's place, which writes these lines and then reads to its end."""
    program = f"import sys; sys.stdout.write({chr(10).join([*lines, ''])!r}); sys.stdout.flush()"
    words = (sys.executable, "-c", f"{program}; sys.stdin.read()")
    made = sandbox.Command(words=words, variables={}, has_door=has_door)
    monkeypatch.setattr(sandbox, "command", lambda *_, **__: made)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"ready": true}', "it said twice that it is ready"),
        ("[]", "it wrote what is no message: b'[]'"),
        ("7", "it wrote what is no message: b'7'"),
        ("[" * 100_000, "it wrote what is no message: b'[[["),
        ('{"id": 1}', """it wrote what is no message: b'{"id": 1}'"""),
        ('{"done": true}', """it wrote what is no message: b'{"done": true}'"""),
    ],
)
def test_a_host_that_says_what_no_host_says_is_lost(
    start: Started, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    _says(monkeypatch, '{"ready": true}', line)
    message = start().hear()
    assert message["lost"] and message["error"].startswith(said)


def test_a_confined_program_that_hands_no_socket_over_is_told_of_at_once(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    _says(monkeypatch, '{"ready": true, "program": true}', has_door=True)
    message = start(ready=False).hear()
    assert message["lost"] and message["fatal"]
    assert "had sent no socket on which its agents ask the policy" in message["error"]


def test_writing_to_a_stopped_host_holds_nobody(start: Started) -> None:
    parent = start()
    os.kill(parent.host.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    for ordinal in range(50):
        parent.open(ordinal, prompt="x" * (1 << 20))
    assert time.monotonic() - began < PATIENCE_S / 2
    parent.hosts.replace(parent.host)
    assert parent.hear()["ready"]
    parent.open(1)
    assert parent.hear()["id"] == [1, 0]


def test_a_stopped_host_gets_all_that_was_sent_once_it_goes_on(start: Started) -> None:
    parent = start()
    os.kill(parent.host.process.pid, signal.SIGSTOP)
    for ordinal in range(20):
        parent.open(ordinal, prompt="x" * (1 << 18))
    os.kill(parent.host.process.pid, signal.SIGCONT)
    assert [parent.hear()["id"][0] for _ in range(20)] == list(range(20))


def test_what_an_environment_started_ends_with_its_host(start: Started, tmp_path: Path) -> None:
    parent = start(config={"marks": str(tmp_path)})
    parent.open(reset="start")
    until((tmp_path / "child").exists, "a child runs")
    child = int((tmp_path / "child").read_text())
    assert _lives(child)
    parent.hosts.replace(parent.host)
    until(lambda: not _lives(child), "the child is gone")


def test_open_episodes_are_closed_when_all_hosts_end(start: Started, tmp_path: Path) -> None:
    parent = start(config={"marks": str(tmp_path)}, number=2)
    for ordinal in range(4):
        parent.open(ordinal, step="wait")
        parent.hear()
    parent.step(3)
    until((tmp_path / "waits").exists, "one is in the midst of a turn")
    parent.hosts.close()
    assert {file.name for file in tmp_path.glob("closed.*")} == {f"closed.{i}" for i in range(4)}


@pytest.mark.parametrize("does", ["wait", "loop", "hold", "stop"])
def test_a_host_ends_when_its_parent_is_killed(tmp_path: Path, does: str) -> None:
    program = f"""
import sys
from gcore_environments.hosts import Hosts, HostSettings
config = {{"marks": {str(tmp_path)!r}}}
hosts = Hosts(HostSettings(environment={f"{FILE}:Unruly"!r}, config=config))
host, ready = hosts.replies.get()
host.send(op="open", id=[1, 0], seed=0, row={{"reset": {does!r}}}, endpoint={{}})
print(host.process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until((tmp_path / f"{does}s").exists, "it hangs")
        parent.kill()
    until(lambda: not _lives(pid), "the host is gone")


# -- starting --------------------------------------------------------------------------------------


def test_messages_wait_for_imports_that_take_long(start: Started, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    file = tmp_path / "late.py"
    file.write_text(
        f"open({str(tmp_path / 'go')!r}).read()\n{FILE.read_text()}".replace(
            "from __future__ import annotations\n", ""
        )
    )
    parent = start(environment=f"{file}:Unruly", ready=False)
    parent.open()
    assert not parent.host.ready
    (tmp_path / "go").write_text("")
    assert parent.hear() == {"ready": True, "program": False}
    assert parent.host.ready
    assert parent.hear()["id"] == [1, 0]


def test_a_host_that_imports_still_is_ended(start: Started, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    file = tmp_path / "late.py"
    file.write_text(f"open({str(tmp_path / 'go')!r}).read()")
    start(environment=f"{file}:Late", ready=False)


@pytest.mark.parametrize(
    ("place", "config", "said"),
    [
        ("nowhere.py:One", {}, "there is no file {tmp}/nowhere.py"),
        ("{file}:Unrly", {}, "{file} has no class Unrly; did you mean Unruly?"),
        ("{file}:words", {}, "{file} has no class words; environments and programs there: Asking"),
        ("{file}:Strange", {}, "is neither an environment, which has the methods reset and step"),
        ("{file}:Unruly", {"mark": 1}, "unexpected keyword argument 'mark'; it takes: marks"),
        ("needs.py:One", {}, "ModuleNotFoundError: No module named 'no_such_package'; install it"),
        ("wrong.py:One", {}, "SyntaxError: "),
        (
            "raises.py:One",
            {},
            "cannot be imported: ValueError: not today ({tmp}/raises.py, line 2)",
        ),
        ("leaves.py:One", {}, "cannot be imported: SystemExit: 1"),
        ("no.such.module:One", {}, "no.such.module cannot be imported: ModuleNotFoundError: No"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence(
    start: Started, tmp_path: Path, place: str, config: dict[str, Any], said: str
) -> None:
    (tmp_path / "needs.py").write_text("import no_such_package")
    (tmp_path / "wrong.py").write_text("def")
    (tmp_path / "raises.py").write_text("\nraise ValueError('not today')")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(1)")
    place = place.format(file=FILE)
    if ".py" in place:
        place = str(tmp_path / place)
    parent = start(environment=place, config=config, ready=False)
    message = parent.hear()
    assert message["lost"] is True
    assert message["fatal"] is True
    assert said.format(file=FILE, tmp=tmp_path) in message["error"]
    assert "\n" not in message["error"]


def test_an_interpreter_that_is_not_there_is_an_error_of_the_start() -> None:
    settings = HostSettings(environment=f"{FILE}:Unruly", python="/no/such/python")
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        Hosts(settings)


def test_a_module_of_the_job_s_folder_may_be_named(start: Started, tmp_path: Path) -> None:
    (tmp_path / "games").mkdir()
    (tmp_path / "games/__init__.py").write_text("")
    (tmp_path / "games/one.py").write_text(FILE.read_text())
    parent = start(environment="games.one:Unruly", directory=str(tmp_path))
    parent.open()
    assert parent.hear()["id"] == [1, 0]


def test_a_module_below_the_words_is_found_without_being_installed(start: Started) -> None:
    parent = start(environment="gcore_environments.words:Tools")
    parent.open(prompt="hello")
    assert parent.hear()["messages"] == [{"role": "user", "content": "hello"}]


def test_a_confined_adapter_sees_the_adapters() -> None:
    shown = sandbox.own_files("gcore_environments.adapters.gymnasium:Gymnasium", "")
    assert shown == [str(sandbox.HERE / "adapters")]


def test_a_file_finds_what_lies_next_to_it_and_may_have_any_name(
    start: Started, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text(FILE.read_text())
    (tmp_path / "json.py").write_text("from helper import Unruly")
    parent = start(environment=f"{tmp_path / 'json.py'}:Unruly")
    parent.open()
    assert parent.hear()["id"] == [1, 0]


def test_an_environment_runs_in_an_interpreter_that_has_nothing_of_ours(
    start: Started, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare/bin/python")
    absent = [python, "-c", "import gcore_environments"]
    assert subprocess.run(absent, capture_output=True, check=False).returncode == 1
    file = tmp_path / "where.py"
    file.write_text(
        "import sys\nfrom gcore_environments import Tools\n"
        "from gcore_environments.words import Observation\n"
        "class Where(Tools):\n"
        "    def interpreter(self) -> str:\n"
        "        'Says where it runs.'\n"
        "        return sys.prefix\n"
    )
    parent = start(environment=f"{file}:Where", python=python)
    parent.open()
    assert parent.hear()["tools"][0]["function"]["description"] == "Says where it runs."
    call = {"name": "interpreter", "arguments": {}, "id": "a"}
    parent.host.send(op="step", id=[1, 0], turn=1, text="", calls=[call], status="finished")
    assert parent.hear()["messages"][0]["content"] == str(tmp_path / "bare")


# -- what it sees ----------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def _seen(parent: Parent, paths: list[Path], address: tuple[str, int]) -> dict[str, Any]:
    parent.open(reset="see", paths=list(map(str, paths)), address=list(address))
    message = parent.hear()
    assert "error" not in message, message
    seen: dict[str, Any] = json.loads(message["messages"][0]["content"])
    return seen


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder of a job, with an environment and the files of a run."""
    (tmp_path / "unruly.py").write_text(FILE.read_text())
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/secret").write_text("of the run")
    (tmp_path / "job.yaml").write_text("run: {}")
    return tmp_path


def test_a_host_sees_no_variable_of_the_run(
    start: Started, job: Path, listener: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GCORE_SECRET", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hush")
    parent = start(environment=f"{job}/unruly.py:Unruly", variables={"GAME": "chess"})
    seen = _seen(parent, [job / "runs/one/secret"], listener)
    kept = {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHASHSEED"}
    own = {"LC_CTYPE"}  # Python sets it itself where the locale is C
    assert seen["variables"].keys() <= kept | own | {"GAME"}
    assert seen["variables"]["GAME"] == "chess"
    assert "hush" not in json.dumps(seen)
    assert seen["network"] == "open"
    assert seen[str(job / "runs/one/secret")] == "of the run"
    for process in ("environ", "cmdline"):
        assert b"hush" not in Path(f"/proc/{parent.host.process.pid}/{process}").read_bytes()


def test_a_host_has_no_file_of_its_parent_open(start: Started, job: Path) -> None:
    """Not even one that the parent's children would inherit."""
    with (job / "runs/one/secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        parent = start()
        folder = Path(f"/proc/{parent.host.process.pid}/fd")
        opened = [os.readlink(entry) for entry in folder.iterdir()]
    assert not [path for path in opened if path.startswith(str(job))]
    # its messages in and out, the lifeline and the loop's own; standard error is the parent's
    assert len(opened) < 12


def test_a_confined_host_sees_neither_network_nor_files_of_the_run(
    start: Started, job: Path, listener: tuple[str, int]
) -> None:
    if why := sandbox.problem("confine"):
        pytest.skip(why)
    (job / "data.txt").write_text("read me")
    parent = start(
        environment=f"{job}/unruly.py:Unruly", sandbox="confine", readable=(str(job / "data.txt"),)
    )
    hidden = [job / "runs/one/secret", job / "job.yaml", Path(f"/proc/{os.getpid()}/environ")]
    seen = _seen(parent, [*hidden, job / "data.txt"], listener)
    assert [seen[str(path)] for path in hidden] == ["FileNotFoundError"] * 3
    assert seen[str(job / "data.txt")] == "read me"
    assert seen["network"] != "open"
    assert parent.hosts.of((1, 0)).process.poll() is None


def test_a_confined_host_is_killed_with_all_that_it_started(start: Started, job: Path) -> None:
    if why := sandbox.problem("confine"):
        pytest.skip(why)
    parent = start(environment=f"{job}/unruly.py:Unruly", sandbox="confine")
    parent.open(reset="loop")

    def holds() -> bool:
        parent.tell("who")
        return parent.hear() == {"late": [1, 0], "current": "episode:1.0"}

    until(holds, "the episode holds the loop")
    group = parent.host.process.pid
    folder = Path(parent.host._command.folder)
    assert folder.is_dir()
    parent.hosts.replace(parent.host)
    assert not folder.exists()
    until(lambda: not _members(group), "nobody of its group lives")


def _members(group: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def test_a_program_is_not_run_where_it_cannot_ask_the_policy() -> None:
    """A container has no network."""
    words = str(sandbox.HERE / "words.py")
    settings = {"environment": f"{FILE}:Asking", "words": words, "no_network": True}
    done = subprocess.run(
        [sys.executable, sandbox.HERE / "host.py"],
        input=f"{json.dumps(settings)}\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert "this sandbox has none" in json.loads(done.stdout)["error"]


def test_a_sandbox_that_is_not_to_be_had_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no docker here" in sandbox.problem("docker")
    with pytest.raises(ConfigError, match="there is no docker here"):
        Hosts(HostSettings(environment=f"{FILE}:Unruly", sandbox="docker"))
    assert sandbox.problem("none") == ""
    assert "there is no sandbox 'jail'; take one of: none" in sandbox.problem("jail")
    for name in ("none", "confine"):
        assert "interpreter /no/python cannot be started" in sandbox.problem(name, "/no/python")


def test_the_check_of_a_job_names_what_cannot_be_had_on_this_machine() -> None:
    def told(here: bool = True, use: str = "environments", **config: str) -> list[str]:
        return list(host_problems({"environment": {"use": use, "config": config}}, here))

    (problem,) = told(python="/no/python")
    assert problem.startswith("environment.config: the interpreter /no/python cannot be started")
    assert told(here=False, python="/no/python") == told(use="mine", python="/no/python") == []
    (problem,) = told(environment=f"{FILE.parent}/unrly.py:Unruly")
    assert f"no such file: {FILE.parent}/unrly.py (did you mean 'unruly.py'?)" in problem
    assert told() == told(sandbox="none") == list(host_problems({"environment": None}, True)) == []


@pytest.mark.parametrize(
    ("text", "sandbox", "said"),
    [
        (
            "class Gmae:\n    pass",
            "none",
            "has no class Game (did you mean 'Gmae'?); classes there: G",
        ),
        ("Game = 1 + 1", "none", ""),
        ("from others import Game", "none", ""),
        ("from others import *", "none", ""),
        ("if True:\n    class Game: pass", "none", ""),
        ("def made(): pass", "none", "has no class Game; classes there: none."),
        ("a line of no Python", "none", ""),
        ("class Game:\n    async def run(self): ...", "none", ""),
        ("class Game:\n    async def run(self): ...", "confine", ""),
        ("class Game:\n    async def run(self): ...", "docker", "Game is a program, which asks"),
        ("class Game:\n    def run(self): ...\n    def reset(self): ...", "docker", ""),
    ],
)
def test_the_check_of_a_job_reads_its_file_without_running_it(
    tmp_path: Path, text: str, sandbox: str, said: str
) -> None:
    file = tmp_path / "games.py"
    file.write_text(text)
    config = {"environment": f"{file}:Game", "sandbox": sandbox}
    told = host_problems({"environment": {"use": "environments", "config": config}}, True)
    own = [one for one in told if not one.startswith("environment.config: ")]  # of the machine
    assert [said in one for one in own] == [True] * bool(said), own


def test_an_interpreter_that_is_too_old_is_an_error_before_anything_starts(
    start: Started, tmp_path: Path
) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 2\n")
    old.chmod(0o755)
    assert f"{old} is not Python 3.11 or later" in sandbox.problem("none", str(old))
    said = start(python=str(old), ready=False).hear()["error"]
    assert said.startswith("its process ended with exit code 2 before it was ready")


def test_a_container_is_started_without_network_or_rights_and_is_ended_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "game.py").write_text("")
    made = sandbox.command(
        "docker",
        environment=f"{tmp_path}/game.py:Game",
        variables={"PATH": "/bin", "PYTHONHASHSEED": "0"},
        image="games:1",
    )
    line = " ".join(made.words)
    assert "--network none --read-only --cap-drop ALL" in line
    assert f"--volume {tmp_path}/game.py:{tmp_path}/game.py:ro" in line
    assert "--env PYTHONHASHSEED=0" in line
    assert "PATH=" not in line
    assert line.endswith(f"games:1 python3 -s -P {sandbox.HERE / 'host.py'}")
    name = made.words[made.words.index("--name") + 1]
    assert made.kill == (str(docker), "kill", name)


def test_hosts_are_chosen_by_key_for_negative_ordinals_too(start: Started) -> None:
    hosts = start(number=2).hosts
    chosen: list[Host] = [hosts.of((-3, 1)), hosts.of((-3, 0))]
    assert [host.number for host in chosen] == [0, 1]
