"""Plays episodes of one environment, in any Python from 3.11: lines of JSON in, lines of JSON out.

    python host.py

This file uses the standard library only and imports nothing of the project: the interpreter may be
one that has nothing but the environment's own packages. The first line says what to run:

    {"environment": "file.py:Class", "config": {}, "words": "/path/of/words.py", "directory": ""}

The next ones are messages, told apart by ``op``; an episode is named by its ``id``, of two numbers:

    open {id, seed, row, endpoint}      begins an episode, and ends one of the same name before
    step {id, turn, text, calls, ...}   what the policy said: the fields of Reply
    close {id}                          the episode is over, whatever it does
    cancel {id}                         the same; it awaits what does not come
    who {id}                            asks which episode holds the event loop; id is handed back
    end {}                              all episodes are over, and this process

What comes back:

    {"ready": true, "program": false}   the class is imported
    {"id", "turn", ...}                 the fields of an Observation
    {"id", "turn", "error", "trace"}    the environment failed, and is closed
    {"late", "current"}                 the answer to who: "episode:ORDINAL.SAMPLE", or null where
                                        the loop is free
    {"lost": true, "fatal": true, "error", "trace"}     it cannot be run, and this process ends

What the environment prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import random
import socket
import sys
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import Any

#: Seconds that an environment's ``close`` may take.
CLOSES_WITHIN_S = 10.0
#: Who alone runs in the loop for so long, when who is asked, holds it.
HOLDS_S = 0.5
_LOOKS_EVERY_S = 0.02
_READ_BYTES = 1 << 20
#: Threads that ``asyncio.to_thread`` may use at once, each begun when it is needed. An agent that
#: blocks has one for its whole life, and with fewer than episodes some would wait for others.
_MOST_THREADS = 1024
_TRACE_CHARACTERS = 4000
#: What an environment's code may raise; a task that catches less would end this process.
_RAISED = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)

#: The name of the episode that a task belongs to. Tasks that it starts take it over.
_episode: contextvars.ContextVar[str] = contextvars.ContextVar("episode")


class Wrong(Exception):
    """What was asked for cannot be run; the text says why."""


class Output:
    """Writes messages, from any thread.

    loop: in whose thread ``send_soon`` is called; None before it runs.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []

    def send(self, **message: Any) -> None:
        """Raises TypeError or ValueError where the message is not JSON."""
        self._add(message)
        self.flush()

    def send_soon(self, **message: Any) -> None:
        """Sends a message with those that other episodes have now. Raises as ``send``."""
        assert self.loop is not None
        if self._add(message):
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Writes what is not sent yet."""
        with self._lock:
            left, self._unsent = memoryview(b"".join(self._unsent)), []
            while left:
                left = left[os.write(self._descriptor, left) :]

    def _add(self, message: dict[str, Any]) -> bool:
        """Keeps a message to be sent; returns whether it is the first one."""
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._unsent.append(line)
            return len(self._unsent) == 1


# -- the class -------------------------------------------------------------------------------------


def register_words(path: str) -> ModuleType:
    """Makes words.py the module ``gcore_environments`` of this process.

    It is that also where the distribution is installed: its package would import the core. Modules
    next to words.py are found below it.
    """
    folder = str(Path(path).parent)
    spec = importlib.util.spec_from_file_location(
        "gcore_environments", path, submodule_search_locations=[folder]
    )
    words = _imported("gcore_environments", spec)
    sys.modules["gcore_environments.words"] = words
    return words


def load(place: str, config: dict[str, Any], directory: str) -> type:
    """Returns the class at "file.py:Class" or "package.module:Class".

    config: what it is to be made with.
    directory: where modules are looked for that are not installed.
    Raises Wrong where there is none, or where it cannot be made with that.
    """
    where, _, name = place.rpartition(":")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where, directory)
    except Wrong:
        raise
    except ImportError as error:
        todo = f"install it for {sys.executable}, or name another interpreter as python"
        raise Wrong(f"{where} cannot be imported: {_said(error)}; {todo}") from error
    except (Exception, SystemExit) as error:
        raise Wrong(f"{where} cannot be imported: {_said(error)}{_place(error)}") from error
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        raise Wrong(f"{where} has no class {name}{_others(module, name)}")
    if not _plays(cls):
        raise Wrong(
            f"{place} is neither an environment, which has the methods reset and step, nor a "
            "program, which has run"
        )
    _require_config(cls, place, config)
    return cls


def is_program(cls: type) -> bool:
    """Whether a class is a Program, which owns its loop."""
    return not hasattr(cls, "reset") and hasattr(cls, "run")


def _plays(cls: Any) -> bool:
    return hasattr(cls, "run") or (hasattr(cls, "reset") and hasattr(cls, "step"))


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Wrong(f"there is no file {path}")
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # what lies next to it can be imported, as by a program
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"environment_{path.stem}" if taken else path.stem
    return _imported(name, importlib.util.spec_from_file_location(name, path))


def _from_name(name: str, directory: str) -> ModuleType:
    if directory and directory not in sys.path:
        sys.path.insert(0, directory)
    return importlib.import_module(name)


def _imported(name: str, spec: Any) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _others(module: ModuleType, name: str) -> str:
    """Names classes of a module that could be meant."""
    own = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and _plays(value)
    ]
    close = difflib.get_close_matches(name, own, 1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; environments and programs there: {', '.join(sorted(own)) or 'none'}"


def _require_config(cls: type, place: str, config: dict[str, Any]) -> None:
    """Raises Wrong where a class cannot be called with its config."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # of a class in C
        return
    try:
        signature.bind(**config)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        raise Wrong(f"config does not fit {place}: {error}; it takes: {names}") from error


# -- what comes of an episode ----------------------------------------------------------------------


def checked_observation(said: Any, words: ModuleType, where: str) -> dict[str, Any]:
    """Returns the fields of an observation. Raises TypeError or ValueError where it is wrong."""
    if not isinstance(said, words.Observation):
        raise TypeError(f"{where} returned {_kind(said)}, not an Observation")
    fields = dict(vars(said))
    for name in ("messages", "tools"):
        value = fields[name]
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise TypeError(f"{where}: {name} must be a list of dicts, is {_shown(value)}")
    for message in fields["messages"]:
        _require_message(message, where)
    for name in ("done", "truncated"):
        if not hasattr(fields[name], "__bool__"):  # a text such as "no" would count as true
            raise TypeError(f"{where}: {name} must be a bool, is {_kind(fields[name])}")
        fields[name] = bool(fields[name])
    for name in ("reason", "player"):
        if not isinstance(fields[name], str):
            raise TypeError(f"{where}: {name} must be a str, is {_kind(fields[name])}")
    fields["rewards"] = checked_rewards(fields["rewards"], where)
    is_over = fields["done"] or fields["truncated"]
    if not is_over and not fields["messages"] and not fields["player"]:
        raise ValueError(
            f"{where} returned no messages, so the policy is told nothing; give messages, or "
            "done=True where the episode is over"
        )
    return fields


def _require_message(message: dict[str, Any], where: str) -> None:
    """Raises TypeError where a message has no role, or none of what templates write."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise TypeError(f"{where}: a message has no role: {_shown(message)}")
    if content is None and role == "assistant":
        return  # it may have calls alone
    if not isinstance(content, (str, list)):
        raise TypeError(
            f"{where}: content of a message must be a str or a list of parts, is "
            f"{_kind(content)}: {_shown(message)}"
        )


def checked_rewards(rewards: Any, where: str) -> dict[str, float]:
    """Returns rewards by name as floats. Raises TypeError or ValueError where they are none."""
    if not isinstance(rewards, dict):
        raise TypeError(f"{where}: rewards must be a dict of numbers by name, are {_kind(rewards)}")
    checked = {}
    for name, value in rewards.items():
        if not isinstance(name, str) or isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(f"{where}: reward {name!r} must be a number, is {_kind(value)}")
        checked[name] = float(value)
        if checked[name] - checked[name] != 0:
            raise ValueError(f"{where}: reward {name!r} must be finite, is {value}")
    return checked


def _shown(value: Any) -> str:
    return repr(value)[:200]


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place(error: BaseException) -> str:
    """Where an error was raised, where it is known and not in this file, which only found it."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename == __file__:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_TRACE_CHARACTERS:]


class Episode:
    """Lives in one task: what is opened in it, such as sessions, is closed in it."""

    def __init__(self, host: Host, message: dict[str, Any]) -> None:
        self._host = host
        self._id = message["id"]
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait(message)
        self._is_busy = True
        self._is_over = False
        name = "episode:" + ".".join(map(str, self._id))
        context = contextvars.copy_context()
        context.run(_episode.set, name)
        self.task = asyncio.get_running_loop().create_task(self._live(), name=name, context=context)

    def step(self, message: dict[str, Any]) -> None:
        self._is_busy = True
        self._inbox.put_nowait(message)

    def end(self) -> None:
        """Ends the episode, also in the midst of what it does. It says nothing more."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_busy:
            self.task.cancel()
        else:
            self._inbox.put_nowait({"op": "close"})

    async def _live(self) -> None:
        made: Any = None
        message: dict[str, Any] = {}
        try:
            while (message := await self._inbox.get())["op"] != "close":
                if made is None:
                    # Before anything else runs: libraries with one global generator are seeded
                    # for what the environment does up to its first await.
                    random.seed(message["seed"])
                    made = self._host.cls(**self._host.config)
                answer = await self._act(made, message)
                self._is_busy = not self._inbox.empty()
                self._send(message, **answer)
        except _RAISED as error:
            if not self._is_over:
                self._is_over = True
                self._fail(message, error)
        finally:
            self._is_over = True
            await self._close(made)

    async def _act(self, made: Any, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a message asks; returns the fields of the observation that it gives."""
        words = self._host.words
        where = type(made).__name__
        if message["op"] == "step":
            names = ("text", "status", "reasoning", "player")
            told = {name: message[name] for name in names if name in message}
            calls = [words.ToolCall(**call) for call in message.get("calls", ())]
            said = await _value(made.step(words.Reply(calls=calls, **told)))
            return checked_observation(said, words, f"{where}.step")
        if not self._host.is_program:
            said = await _value(made.reset(message["row"], message["seed"]))
            return checked_observation(said, words, f"{where}.reset")
        told = message["endpoint"]
        endpoint = words.Endpoint(**{**told, "base_url": self._host.door or told["base_url"]})
        rewards = await _value(made.run(message["row"], message["seed"], endpoint))
        observation = words.Observation(rewards=checked_rewards(rewards, f"{where}.run"), done=True)
        return dict(vars(observation))

    def _send(self, message: dict[str, Any], **answer: Any) -> None:
        if not self._is_over:
            self._host.output.send_soon(id=self._id, turn=message.get("turn", 0), **answer)

    def _fail(self, message: dict[str, Any], error: BaseException) -> None:
        where = {"open": "run" if self._host.is_program else "reset"}.get(message["op"], "step")
        said = f"{where}: {_said(error)}{_place(error)}"
        turn = message.get("turn", 0)
        self._host.output.send(id=self._id, turn=turn, error=said, trace=_trace(error))

    async def _close(self, made: Any) -> None:
        """Closes what was made. What that raises ends in the log: the episode is over already."""
        if not hasattr(made, "close"):
            return
        try:
            async with asyncio.timeout(self._host.closes_within_s):
                await _value(made.close())
        except _RAISED as error:
            print(f"episode {self._id}: close failed\n{_trace(error)}", file=sys.stderr)


async def _value(said: Any) -> Any:
    """What a method returns, whether or not it is asynchronous."""
    return await said if inspect.isawaitable(said) else said


# -- the process -----------------------------------------------------------------------------------


class Host:
    """Plays the episodes that it is told of, all in one event loop."""

    def __init__(self, settings: dict[str, Any], incoming: BufferedReader, output: Output) -> None:
        self.words = register_words(settings["words"])
        self.config: dict[str, Any] = settings.get("config", {})
        self.cls = load(settings["environment"], self.config, settings.get("directory", ""))
        self.is_program = is_program(self.cls)
        if self.is_program and settings.get("no_network"):
            raise Wrong(
                f"{settings['environment']} is a program, which asks the policy over the network, "
                "and this sandbox has none; take another sandbox, or none"
            )
        self.door = ""  # where the policy is asked, where that is not what ``open`` says
        if self.is_program and "door" in settings:
            self.door = open_door(settings["door"])
        self.closes_within_s = settings.get("closes_within_s", CLOSES_WITHIN_S)
        self.output = output
        self._incoming = incoming
        self._episodes: dict[tuple[int, ...], Episode] = {}
        self._living: set[asyncio.Task[None]] = set()
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], str] = (
            weakref.WeakKeyDictionary()
        )

    async def serve(self) -> None:
        """Plays episodes until it is told to end."""
        self._loop = self.output.loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._task)
        self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
        self._ended = asyncio.Event()
        threading.Thread(target=self._read, daemon=True, name="messages").start()
        self.output.send(ready=True, program=self.is_program)
        await self._ended.wait()
        for episode in list(self._episodes.values()):
            episode.end()
        if self._living:
            await asyncio.wait(self._living, timeout=self.closes_within_s)
        _leave()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **words: Any
    ) -> asyncio.Task[Any]:
        """Makes a task, and notes which episode it belongs to."""
        task = asyncio.Task(coroutine, loop=loop, **words)
        context = words.get("context") or contextvars.copy_context()
        owner = context.get(_episode)
        if owner is not None:
            self._owners[task] = owner
        return task

    def _read(self) -> None:
        """Passes messages on, in a thread of its own: the loop may be what hangs."""
        begun: list[bytes] = []
        while data := self._incoming.read1(_READ_BYTES):
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = b"".join((*begun, lines[0]))
                begun.clear()
            begun.append(rest)
            messages = [json.loads(line) for line in lines]
            for message in messages:
                if message["op"] == "who":
                    threading.Thread(target=self._tell_who, args=(message,), daemon=True).start()
            self._loop.call_soon_threadsafe(self._take_all, messages)
        _leave()  # who started this process is gone

    def _take_all(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["op"] != "who":
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message["op"] == "end":
            self._ended.set()
            return
        key = tuple(message["id"])
        episode = self._episodes.get(key)
        if message["op"] == "step":
            if episode is not None:
                episode.step(message)
            return
        if episode is not None:
            del self._episodes[key]
            episode.end()
        if message["op"] == "open":
            self._episodes[key] = Episode(self, message)
            task = self._episodes[key].task
            self._living.add(task)
            task.add_done_callback(self._living.discard)

    def _tell_who(self, message: dict[str, Any]) -> None:
        self.output.send(late=message["id"], current=self._holder())

    def _holder(self) -> str | None:
        """Names the episode that holds the loop, if one does.

        Whoever runs just now may be innocent. So the loop is asked for a sign first, and only who
        keeps it from that for ``HOLDS_S`` is named.
        """
        is_free = threading.Event()
        self._loop.call_soon_threadsafe(is_free.set)
        seen = set()
        for _ in range(int(HOLDS_S / _LOOKS_EVERY_S)):
            if is_free.wait(_LOOKS_EVERY_S):
                return None
            task = asyncio.current_task(self._loop)
            seen.add(None if task is None else self._owners.get(task))
        return seen.pop() if len(seen) == 1 else None


def own_channel() -> tuple[BufferedReader, Output]:
    """Takes standard input and output for messages alone.

    The environment, and the programs that it starts, find nothing to read there, and what they
    print goes to standard error.
    """
    incoming = os.fdopen(os.dup(0), "rb")
    output = Output(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, output


def open_door(descriptor: int) -> str:
    """Listens on the loopback of this process's own network, and hands the socket over.

    descriptor: of a socket to who started this process, and is to serve the other one.
    Returns the base address for agents.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as door:
        with socket.socket(fileno=descriptor) as parent:
            socket.send_fds(parent, [b"."], [door.fileno()])
        return f"http://127.0.0.1:{door.getsockname()[1]}/v1"


def main() -> None:
    incoming, output = own_channel()
    settings = json.loads(incoming.readline() or "null")
    if settings is None:
        return  # who started this process is gone
    try:
        host = Host(settings, incoming, output)
    except Wrong as error:
        traceback.print_exc()
        output.send(lost=True, fatal=True, error=str(error), trace=_trace(error))
        return
    asyncio.run(host.serve())


def _leave() -> None:
    """Ends this process, whatever tasks and threads an environment has left."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    _leave()
