"""What ``g-core conformance rewards`` runs: contracts of providers, with a record that they cannot score."""

from __future__ import annotations

import pytest

from gcore_core.protocols import ScoredRecord
from gcore_core.testing import ScorerContract
from gcore_core.testing.contracts.scorer import scored_record


class _Verifier(ScorerContract):
    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """Its row has no answer."""
        return scored_record(99, "3", {})


class TestExactMatch(_Verifier):
    provider = "rewards/exact-match"


class TestNumeric(_Verifier):
    provider = "rewards/numeric"
