"""The words in which an environment is written: what the policy says, what it is told, its tools.

An environment runs in a process of its own, in any interpreter of Python 3.11 or later. There this
file is the module ``gcore_environments``, whether or not the distribution is installed, so it uses
the standard library only:

    from gcore_environments import Observation, Reply, Tools
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import random
import threading
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Union

__all__ = [
    "Endpoint",
    "Environment",
    "Observation",
    "Program",
    "Reply",
    "ToolCall",
    "Tools",
    "schema_of",
]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any] | None
    """None: they could not be read; ``text`` has what was written."""
    text: str = ""
    """The call as it was sampled, where the parser knows it."""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the policy said in one turn: its text without the calls of tools, and these calls."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    status: str = "finished"
    """``finished``, or ``truncated`` where the limit of tokens cut it."""
    reasoning: str = ""
    """What it thought, where the model's template marks that."""
    player: str = ""
    """Who said it, in an environment of several players."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the policy is told next. Its messages are appended: nothing that was said changes."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of a chat: ``role``, ``content``, and what else the template reads."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools. What ``reset`` says holds for the episode."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Of the turn before, by name. Rewards of one name are summed over the turns."""
    done: bool = False
    """Whether the episode has come to its end."""
    truncated: bool = False
    """Whether it ends here though it has not come to its end, by a limit of the environment's."""
    reason: str = ""
    """Why it ends, for the report."""
    player: str = ""
    """Who speaks next, in an environment of several players."""


class Environment(Protocol):
    """Reacts to what the policy says. One object lives for one episode, in one task of asyncio."""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begins the episode.

        row: ``prompt`` (its text), ``messages`` (as a chat), and the row's other fields.
        seed: of the sample. The same seed and the same replies give the same observations. The
            module ``random`` is seeded with it before the object is made.
        """
        ...

    async def step(self, reply: Reply) -> Observation:
        """Returns what comes of a reply."""
        ...

    async def close(self) -> None:
        """Ends the episode. Called in any case: also after an error, or when it is cancelled."""
        ...


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a program asks the policy: a server that speaks as OpenAI's does, on this machine."""

    base_url: str
    """With ``/v1`` at its end."""
    api_key: str
    """Says which episode asks; it ends with the episode."""
    model: str = "policy"


class Program(Protocol):
    """Owns its loop, and asks the endpoint as it likes. One object lives for one episode."""

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        """Runs the episode and returns its rewards by name. See ``Environment.reset``."""
        ...


_UNIONS = (Union, types.UnionType)
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_KNOWN = "str, int, float, bool, list, list[T], dict, dict[str, T], Literal, T | None, Any"


class Tools:
    """An environment whose public methods are tools. It ends when the policy calls none.

        class Calculator(Tools):
            def add(self, numbers: list[int]) -> int:
                "Adds numbers."
                return sum(numbers)

            def rewards(self, reply):
                return {"right": float(reply.text.strip() == self.row["answer"])}

    The types and the docstring of a method are what the policy is shown; the docstring's section
    ``Args:`` describes the arguments. What a tool returns, raises, or does not finish within
    ``tool_s`` is an observation, as is a call that names no tool or has wrong arguments.

    Calls of one turn: asynchronous methods run at the same time; others run one after the other,
    in a thread, so that a method which waits holds nobody else. A thread cannot be stopped: that
    of a method which never returns stays until the process ends.

    row, seed: of the episode.
    random: seeded with it. Unlike the module's own functions it is of this episode alone.
    """

    tool_s: float = 10.0
    """Longest that a call may take."""

    row: dict[str, Any]
    seed: int
    random: random.Random
    _signatures: dict[str, dict[str, inspect.Parameter]] = {}  # noqa: RUF012 - of the class
    _schemas: list[dict[str, Any]] = []  # noqa: RUF012 - of the class

    def __init_subclass__(cls, **words: Any) -> None:
        """Looks at the tools. Raises TypeError where a method cannot be one."""
        super().__init_subclass__(**words)
        taken = [name for name in Tools.__annotations__ if callable(vars(cls).get(name))]
        if taken:
            raise TypeError(f"{cls.__name__}.{taken[0]} is a name that Tools uses itself")
        cls._signatures = {name: _parameters(cls, name) for name in _tool_names(cls)}
        cls._schemas = [
            _schema(name, parameters, inspect.getdoc(getattr(cls, name)) or "")
            for name, parameters in cls._signatures.items()
        ]

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.row = row
        self.seed = seed
        self.random = random.Random(seed)
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        return Observation(messages=list(messages), tools=list(self._schemas))

    async def step(self, reply: Reply) -> Observation:
        """Calls what the policy calls; where it calls nothing, gives the rewards and ends."""
        if not reply.calls:
            rewards = await _outcome(self.rewards, {"reply": reply})
            return Observation(rewards=rewards, done=True)
        in_turn = asyncio.Lock()
        answers = [self._answer(call, in_turn) for call in reply.calls]
        said = await asyncio.gather(*answers) if len(answers) > 1 else [await answers[0]]
        return Observation(
            messages=[
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
                for call, text in zip(reply.calls, said, strict=True)
            ]
        )

    def rewards(self, reply: Reply) -> dict[str, float]:
        """Returns rewards by name for the last reply, which calls no tool. May be asynchronous."""
        return {}

    async def close(self) -> None:
        pass

    async def _answer(self, call: ToolCall, in_turn: asyncio.Lock) -> str:
        """Calls a tool and returns what the policy is told of it."""
        parameters = self._signatures.get(call.name)
        if parameters is None:
            names = ", ".join(self._signatures) or "none"
            return f"error: there is no tool {call.name!r}. Tools: {names}"
        if call.arguments is None:
            return f"error: the arguments of {call.name} are not a JSON object"
        try:
            arguments = _converted(call.arguments, parameters)
        except ValueError as error:
            return f"error: {call.name}: {error}"
        method = getattr(self, call.name)
        waits = inspect.iscoroutinefunction(method)
        try:
            async with contextlib.nullcontext() if waits else in_turn:
                async with asyncio.timeout(self.tool_s):
                    value = await _outcome(method, arguments)
        except TimeoutError:
            return f"error: {call.name} did not end within {self.tool_s:g} s"
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return _text(call.name, value)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function as a tool. Raises TypeError where it cannot be one."""
    name = getattr(function, "__name__", "tool")
    signature = _signature(function, name)
    parameters = dict(signature.parameters)
    _require_types(name, parameters)
    return _schema(name, parameters, inspect.getdoc(function) or "")


# -- what a tool is --------------------------------------------------------------------------------


def _tool_names(cls: type) -> list[str]:
    """Names of the public methods that a class has beside those of Tools, as they were written."""
    names = {name: None for base in reversed(cls.__mro__) for name in vars(base)}
    return [
        name
        for name in names
        if not name.startswith("_")
        and not hasattr(Tools, name)
        and callable(value := getattr(cls, name))
        and not inspect.isclass(value)
    ]


def _parameters(cls: type, name: str) -> dict[str, inspect.Parameter]:
    """What a call of a class's tool may have, by name."""
    method = getattr(cls, name)
    where = f"{cls.__name__}.{name}"
    parameters = list(_signature(method, where).parameters.items())
    if inspect.isfunction(inspect.getattr_static(cls, name)):  # neither static nor of the class
        parameters = parameters[1:]
    _require_types(where, dict(parameters))
    return dict(parameters)


def _signature(function: Callable[..., Any], where: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError, AttributeError) as error:
        raise TypeError(f"tool {where}: a type cannot be read: {error}") from error


def _require_types(where: str, parameters: dict[str, inspect.Parameter]) -> None:
    """Raises TypeError where an argument has no type that JSON has a schema for."""
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {where}: {parameter} cannot be an argument, since the policy passes each "
                "by its name. Write them out, or begin the method's name with an underscore"
            )
        if parameter.annotation is parameter.empty:
            raise TypeError(
                f"tool {where}: argument {name} has no type. Write one of: {_KNOWN}; or begin "
                "the method's name with an underscore, then it is no tool"
            )
        try:
            _type_schema(parameter.annotation)
        except TypeError as error:
            raise TypeError(f"tool {where}: argument {name}: {error}") from None


def _schema(name: str, parameters: dict[str, inspect.Parameter], docstring: str) -> dict[str, Any]:
    description, about = _described(docstring, parameters)
    properties = {}
    for key, parameter in parameters.items():
        schema = dict(_type_schema(parameter.annotation))
        if key in about:
            schema["description"] = about[key]
        if parameter.default is not parameter.empty and _is_json(parameter.default):
            schema["default"] = parameter.default
        properties[key] = schema
    required = [key for key, one in parameters.items() if one.default is one.empty]
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}


def _type_schema(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises TypeError for one that JSON has none for."""
    if isinstance(annotation, typing.Hashable) and annotation in _PLAIN:
        return dict(_PLAIN[annotation])
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is Literal and all(isinstance(part, str | int | None) for part in parts):
        return {"enum": list(parts)}
    if origin in _UNIONS:
        return {"anyOf": [_type_schema(part) for part in parts]}
    if origin is list:
        return {"type": "array", "items": _type_schema(parts[0])}
    if origin is dict and parts[0] is str:
        return {"type": "object", "additionalProperties": _type_schema(parts[1])}
    raise TypeError(
        f"{_named(annotation)} is not a type that a tool can take. Write one of: {_KNOWN}"
    )


def _named(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _described(docstring: str, names: typing.Container[str]) -> tuple[str, dict[str, str]]:
    """Parts a docstring; returns (what stands before ``Args:``, what it says of each argument)."""
    before, _, after = docstring.partition("\nArgs:\n")
    about: dict[str, str] = {}
    latest = ""
    for line in after.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        name, colon, text = line.strip().partition(":")
        if colon and name in names:
            latest = name
            about[name] = text.strip()
        elif latest and line.strip():
            about[latest] = f"{about[latest]} {line.strip()}".strip()
    return before.strip(), about


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


# -- calls -----------------------------------------------------------------------------------------


def _converted(
    arguments: dict[str, Any], parameters: dict[str, inspect.Parameter]
) -> dict[str, Any]:
    """Returns a call's arguments, each as its type. Raises ValueError where one does not fit."""
    missing = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and name not in arguments
    ]
    extra = [name for name in arguments if name not in parameters]
    faults = [f"argument {name} is missing" for name in missing]
    takes = ", ".join(parameters) or "none"
    faults += [f"there is no argument {name} (there are: {takes})" for name in extra]
    converted = {}
    for name, value in arguments.items():
        if name in parameters:
            try:
                converted[name] = _as_type(value, parameters[name].annotation, f"argument {name}")
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults))
    return converted


def _as_type(value: Any, annotation: Any, where: str) -> Any:
    """Returns a value of JSON as a type. Raises ValueError where it is none."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin in _UNIONS:
        for part in parts:
            with contextlib.suppress(ValueError):
                return _as_type(value, part, where)
    elif isinstance(value, list) and list in (origin, annotation):
        inner = parts[0] if parts else Any
        return [_as_type(one, inner, f"{where}[{i}]") for i, one in enumerate(value)]
    elif isinstance(value, dict) and dict in (origin, annotation):
        inner = parts[1] if parts else Any
        return {key: _as_type(one, inner, f"{where}[{key!r}]") for key, one in value.items()}
    elif _is_value(value, annotation):
        return annotation(value) if annotation in (int, float) else value
    wanted = json.dumps(_type_schema(annotation))
    raise ValueError(f"{where} is {json.dumps(value)[:100]}, which does not fit {wanted}")


def _is_value(value: Any, annotation: Any) -> bool:
    """Whether a value is of a type without parts. 2.0 is an integer, as JSON schema has it."""
    if typing.get_origin(annotation) is Literal:
        return any(type(one) is type(value) and one == value for one in typing.get_args(annotation))
    if annotation is int and isinstance(value, float):
        return value.is_integer()
    if annotation is float and type(value) is int:
        return True
    return annotation is Any or type(value) is annotation


async def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls a function, in a thread unless it is asynchronous. Raises what it raises."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def tell(value: Any, error: BaseException | None) -> None:
        if not ended.done():  # nobody waits any more once its time is over
            ended.set_result((value, error))

    def run() -> None:
        value, raised = None, None
        try:
            value = context.run(function, **arguments)
        except BaseException as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, value, raised)

    # A thread of its own: those of a pool would all be taken once enough calls do not return.
    threading.Thread(target=run, daemon=True, name=f"tool {function.__name__}").start()
    value, error = await ended
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(repr(error))
    return await value if inspect.isawaitable(value) else value


def _text(name: str, value: Any) -> str:
    """What the policy is told of what a tool returned."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"error: what {name} returned is neither text nor JSON: {error}"
