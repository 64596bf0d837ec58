"""What ``g-core conformance rewards`` runs: contracts of providers, with a record that they cannot
score.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from gcore_testing import ScorerContract
from gcore_testing.contracts.scorer import Waited, scored_record

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.scorer import ScoredRecord


class _Verifier(ScorerContract):
    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """Its row has no answer."""
        return scored_record(99, "3", {})


class TestExactMatch(_Verifier):
    provider = "rewards/exact-match"


class TestNumeric(_Verifier):
    provider = "rewards/numeric"


class TestMath(_Verifier):
    provider = "rewards/math"

    @pytest.fixture
    def scorer(self, context: WorkerContext) -> Iterator[Any]:
        pytest.importorskip("math_verify", reason="needs gcore-rewards[math]")
        scorer = self.build(context)
        yield scorer
        scorer.close()


class TestCode(_Verifier):
    provider = "rewards/code"

    @pytest.fixture
    def scorer(self, context: WorkerContext) -> Iterator[Any]:
        try:
            scorer = self.build(context)
        except ConfigError as error:
            pytest.skip(str(error))
        yield scorer
        scorer.close()


class _LengthService(BaseHTTPRequestHandler):
    """Scores a completion by its length; one with ``???`` in it gets an error."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = []
        for record in request["records"]:
            text = record["completion"]
            scores.append(
                {"id": record["id"], **({"error": "no"} if "???" in text else {"score": len(text)})}
            )
        content = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


class TestHttp(ScorerContract):
    provider = "rewards/http"

    @pytest.fixture
    def scorer(self, context: WorkerContext) -> Iterator[Any]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _LengthService)
        loop = asyncio.new_event_loop()
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        scorer = self.build(context, url=f"http://127.0.0.1:{server.server_port}", batch=3)
        yield Waited(scorer, loop)
        loop.run_until_complete(scorer.close())
        loop.close()
        server.shutdown()
        server.server_close()

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """The service gives an error for it."""
        return scored_record(99, "???", {})
