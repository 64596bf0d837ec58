"""Held to what every plugin and every placement policy must keep."""

from __future__ import annotations

from gcore_testing.conformance import contracts_of

globals().update(contracts_of("placement"))
