"""Gets rewards from a service, by one POST of JSON for each batch of records.

docs/how-to/rewards.md describes the protocol. When the service is slow, busy or gone, records get
a failure with a reason in place of a score, and never a wrong score.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import stat
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx2
from gcore_language.json_values import json_value

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.breaker import Breaker, CircuitOpen
from gcore_rewards.config import HttpConfig

_BUSY = 429
_MOST_BYTES = 16 << 20  # of an answer
#: Seconds that a connection without a request is kept. Services close theirs after 2 s (gunicorn),
#: 5 s (uvicorn, Node.js) or more, and a request that meets this end is lost.
_IDLE_S = 1.0


class _Refused(Exception):
    """The service gave no scores, and would not give them for the same request again."""


class _Unavailable(Exception):
    """The service gave no scores now.

    after_s: seconds after which it asks to be tried again; 0 where it does not say.
    """

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


class HttpReward:
    """See ``gcore_core.contract.scorer.AsyncScorer``."""

    def __init__(self, config: HttpConfig, context: WorkerContext) -> None:
        self._config = config
        self._headers = read_headers(config.headers_file) if config.headers_file else {}
        self._breaker = Breaker(config.breaker_failures, config.breaker_s)
        self._connections = asyncio.Semaphore(config.max_in_flight)
        self._client: httpx2.AsyncClient | None = None  # made on the loop that uses it

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        size = self._config.batch
        batches = [records[start : start + size] for start in range(0, len(records), size)]
        by_batch = await asyncio.gather(*map(self._score_batch, batches))
        return [score for scores in by_batch for score in scores]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _score_batch(self, records: Sequence[ScoredRecord]) -> list[Score]:
        texts: list[str] = []
        failed: dict[str, Score] = {}  # id of a record that cannot be sent -> its score
        for record in records:
            try:
                texts.append(json.dumps(json_value(self._described(record))))
            except (ValueError, RecursionError) as error:
                reason = f"the row is not JSON: {error}"[:REASON_CHARACTERS]
                failed[_id(record)] = failure(reason)
        answer: Mapping[str, Any] = {}
        if texts:
            content = f'{{"records": [{", ".join(texts)}]}}'.encode()
            try:
                answer = await self._post_until_answered(content)
            except (_Refused, _Unavailable, CircuitOpen) as error:
                lost = failure(f"the service {error}"[:REASON_CHARACTERS])
                return [failed.get(_id(record), lost) for record in records]
        return [failed.get(_id(r)) or _score(answer.get(_id(r))) for r in records]

    def _described(self, record: ScoredRecord) -> dict[str, Any]:
        prompt = record.prompt
        wanted = self._config.fields
        return {
            "id": _id(record),
            "prompt": prompt.text if prompt.messages is None else prompt.messages,
            "completion": record.text,
            "status": record.status,
            "fields": {k: v for k, v in prompt.fields.items() if wanted is None or k in wanted},
        }

    async def _post_until_answered(self, content: bytes) -> Mapping[str, Any]:
        """Posts until the service answers, and returns id -> the answer's item.

        Raises _Refused, and _Unavailable or CircuitOpen when that is what ended the last attempt.
        """
        config = self._config
        for attempt in itertools.count():
            try:
                async with self._connections:
                    with self._breaker.call():
                        status, answer = await self._post(content)
                break
            except _Unavailable as error:
                if attempt == config.retries or error.after_s > config.longest_wait_s:
                    raise
                # The whole wait is drawn, from 0 on, so that requests that failed together do not
                # come back together.
                drawn_s = random.uniform(0, config.backoff_s * 2**attempt)
                wait_s = min(config.longest_wait_s, error.after_s + drawn_s)
            await asyncio.sleep(wait_s)
        if status != 200:
            raise _Refused(f"answered {status}: {answer[:80].decode('utf-8', 'replace')}")
        return _items(answer)

    async def _post(self, content: bytes) -> tuple[int, bytes]:
        """Returns status and content of an answer that another attempt would not change.

        Raises _Unavailable for 429, 5xx, a broken connection and no answer in time, and _Refused
        for an answer that is too long.
        """
        if self._client is None:
            limits = httpx2.Limits(
                max_connections=self._config.max_in_flight, keepalive_expiry=_IDLE_S
            )
            headers = {
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
                **self._headers,
            }
            self._client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)
        limit_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):  # the library's own limits are of single reads
                async with self._client.stream(
                    "POST", self._config.url, content=content
                ) as response:
                    answer = bytearray()
                    async for part in response.aiter_bytes():
                        answer += part
                        if len(answer) > _MOST_BYTES:
                            raise _Refused(f"answered with more than {_MOST_BYTES >> 20} MiB")
        except TimeoutError:
            raise _Unavailable(f"gave no answer within {limit_s:g} s") from None
        except httpx2.TransportError as error:
            raise _Unavailable(f"cannot be reached: {error or type(error).__name__}") from error
        if response.status_code == _BUSY or response.status_code >= 500:
            raise _Unavailable(
                f"answered {response.status_code}",
                _seconds(response.headers.get("Retry-After", "")),
            )
        return response.status_code, bytes(answer)


def read_headers(path: str) -> dict[str, str]:
    """Reads headers from a file that has ``Name: value`` a line.

    Raises ConfigError, which never shows a value, when the file cannot be read, others may read or
    write it, or a line has another form.
    """
    file = Path(path).expanduser()
    try:
        mode = file.stat().st_mode
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {type(error).__name__}.", where=str(file)) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError("others may read or write it.", where=str(file), todo=f"chmod 600 {file}")
    headers = {}
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not colon or not name.strip() or not value.strip():
            raise ConfigError(f"line {number} is not of the form 'Name: value'.", where=str(file))
        headers[name.strip()] = value.strip()
    return headers


def _id(record: ScoredRecord) -> str:
    return f"{record.ordinal}.{record.sample}"


def _items(content: bytes) -> Mapping[str, Any]:
    """Returns id -> item of ``{"scores": [{"id", "score"}, ...]}``.

    Raises _Refused when the answer has another form or scores a record twice.
    """
    try:
        items = json.loads(content)["scores"]
        by_id = {item["id"]: item for item in items}
    except (ValueError, KeyError, TypeError, RecursionError):
        shown = content[:60].decode("utf-8", "replace")
        raise _Refused(
            f'answered something else than {{"scores": [{{"id", "score"}}]}}: {shown}'
        ) from None
    if len(by_id) != len(items):
        raise _Refused("scored a record twice in one answer")
    return by_id


def _score(item: Any) -> Score:
    """Returns the score in one item of the answer, or a failure that says why there is none.

    item: None where the answer leaves the record out.
    """
    if item is None:
        return failure("the service left this record out")
    if item.get("error"):
        return failure(f"the service failed: {item['error']}"[:REASON_CHARACTERS])
    value = item.get("score")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return failure(f"the service gave {str(value)[:40]}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return Score(value=number) if math.isfinite(number) else failure(f"the service gave {number}")


def _seconds(retry_after: str) -> float:
    """Returns the seconds that a Retry-After header asks for; 0 where it has none that is valid.

    The header holds a number of seconds or a date.
    """
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
