"""What the core itself offers holds the public contracts."""

from __future__ import annotations

from gcore_testing.conformance import contracts_of

globals().update(contracts_of("core"))
