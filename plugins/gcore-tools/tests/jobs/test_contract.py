"""The plugin as a whole holds its public contract."""

from __future__ import annotations

from gcore_testing.conformance import contracts_of

globals().update(contracts_of("jobs"))
