"""What may be set under ``config:`` of this plugin's rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gcore_core.contract.errors import ConfigError
from gcore_rewards.patterns import compiled


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """A comparison of the completion with a field of the row."""

    answer: str = "answer"
    """Field of the row that holds the right answer."""
    pattern: str | None = None
    """Regular expression: its last match is compared, not the whole completion. Where it has a
    group, that counts; of several the one named answer, ``(?P<answer>...)``.
    """
    pattern_s: float = 0.1
    """Seconds of CPU time that the pattern may search one completion; then the reward has the
    status timeout.
    """
    ignore_case: bool = False
    """Take A and a for equal."""
    tolerance: float = 1e-6
    """Largest difference of two numbers that count as equal (numeric only)."""

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ConfigError(f"must not be negative, is {self.tolerance}", where="tolerance")
        if not math.isfinite(self.tolerance):
            raise ConfigError(f"must be finite, is {self.tolerance}", where="tolerance")
        _require_pattern(self.pattern, self.pattern_s)


@dataclass(frozen=True, kw_only=True)
class MathConfig:
    """A comparison of expressions by the library math-verify, in processes of their own."""

    answer: str = "answer"
    """Field of the row that holds the right answer, in LaTeX or as plain text."""
    pattern: str | None = None
    """Regular expression: the answer is looked for in its last match, not in the whole completion.
    Where it has a group, that counts; of several the one named answer, ``(?P<answer>...)``.
    """
    pattern_s: float = 0.1
    """Seconds of CPU time that the pattern may search one completion; then the reward has the
    status timeout.
    """
    digits: int = 6
    """Decimal places that are compared where two numbers are not exactly equal."""
    time_s: float = 5.0
    """Seconds of CPU time that one comparison may take; a completion that takes longer is 0."""
    memory_mib: int = 2048
    """Address space of each process, in MiB."""
    parallel: int = 1
    """How many completions are compared at a time, each in a process of its own."""

    def __post_init__(self) -> None:
        _require_pattern(self.pattern, self.pattern_s)
        if not 0 < self.time_s < math.inf:
            raise ConfigError(f"must be positive, is {self.time_s}", where="time_s")
        for name in ("digits", "memory_mib", "parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, is {getattr(self, name)}", where=name)


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """A service that scores records; what is sent and answered is in docs/how-to/rewards.md."""

    url: str
    """Where requests are posted to: http:// or https://, whose certificate is always verified."""
    fields: list[str] | None = None
    """Fields of the row that are sent. Empty: all of them; []: none."""
    headers_file: str = ""
    """File with headers such as a token, ``Name: value`` a line, that only you can read; absolute,
    or from ``~`` on.
    """
    batch: int = 64
    """Most records of one request."""
    max_in_flight: int = 8
    """Most requests at a time; as many connections are kept, each for 1 s after its last answer."""
    request_timeout_s: float = 10.0
    """Seconds one request may take, its answer included. rewards.<name>.timeout_s must have room
    for the retries.
    """
    retries: int = 4
    """How often a request is sent again after 429, 5xx, a lost connection or no answer in time."""
    backoff_s: float = 0.5
    """Upper end of the first wait, which is drawn from 0 on; it doubles with each retry.
    Retry-After comes on top.
    """
    longest_wait_s: float = 30.0
    """Longest wait. A service that asks for a longer one has failed."""
    breaker_failures: int = 10
    """Requests that must fail one after the other until the service is left alone, and records fail
    at once.
    """
    breaker_s: float = 30.0
    """Seconds after which one request tries whether it is back."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no http:// or https:// address.", where="url")
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "holds a name or password, which would be printed.",
                where="url",
                todo="Use headers_file.",
            )
        if self.headers_file and not self.headers_file.startswith(("/", "~")):
            raise ConfigError(
                f"must be absolute, or start with ~, is {self.headers_file!r}.",
                where="headers_file",
            )
        if (
            self.headers_file
            and parts.scheme == "http"
            and parts.hostname not in ("localhost", "127.0.0.1", "::1")
        ):
            raise ConfigError(
                "its headers would be sent unencrypted.", where="url", todo="Use https://."
            )
        for name in ("batch", "max_in_flight", "breaker_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, is {getattr(self, name)}", where=name)
        for name in ("request_timeout_s", "backoff_s", "longest_wait_s", "breaker_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"must be positive, is {getattr(self, name)}", where=name)
        if self.retries < 0:
            raise ConfigError(f"must not be negative, is {self.retries}", where="retries")


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """A run of the completion's code against the row's tests, confined.

    docs/explanation/security.md says how.
    """

    tests: str = "tests"
    """Field of the row with tests: Python that raises where the code is wrong, or a list of
    such, which may be written as one text of JSON.
    """
    pattern: str = r"```[ \t]*(?i:python3?|py)?[ \t]*\r?\n([\s\S]*?)```"
    """Regular expression: its last match is the code; without a match, 0. Where it has a group,
    that counts; of several the one named answer, ``(?P<answer>...)``.
    """
    pattern_s: float = 0.1
    """Seconds of CPU time that the pattern may search one completion; then the reward has the
    status timeout.
    """
    time_s: float = 10.0
    """Seconds, by the clock and of CPU time, that code and tests may take together."""
    memory_mib: int = 512
    """Memory of each process, in MiB."""
    files_mib: int = 16
    """What may be written in all, in MiB; it lies in memory and is gone afterwards."""
    processes: int = 16
    """Most processes and threads at a time."""
    parallel: int = 2
    """How many completions run at a time."""
    readable: list[str] = field(default_factory=list)
    """Absolute paths that the code may read, beside the system's libraries and this
    interpreter's.
    """
    allow_unconfined: bool = False
    """Where code cannot be confined, run it all the same, with limits of time and memory only."""

    def __post_init__(self) -> None:
        _require_pattern(self.pattern, self.pattern_s)
        if not 0 < self.time_s < math.inf:
            raise ConfigError(f"must be positive, is {self.time_s}", where="time_s")
        for name in ("memory_mib", "files_mib", "processes", "parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, is {getattr(self, name)}", where=name)
        for path in self.readable:
            if not path.startswith("/") or ".." in path.split("/") or path == "/":
                raise ConfigError(
                    f"must be absolute and not the root, is {path!r}", where="readable"
                )


def _require_pattern(pattern: str | None, limit_s: float) -> None:
    """Raises ConfigError for what is not a regular expression, or no limit of its time."""
    compiled(pattern or "")
    if not 0 < limit_s < math.inf:
        raise ConfigError(f"must be positive, is {limit_s}", where="pattern_s")
