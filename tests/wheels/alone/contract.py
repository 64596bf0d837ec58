"""The contracts of the core, held where nothing but the test kit is installed with it."""

from gcore_testing.conformance import contracts_of

globals().update(contracts_of("core"))
