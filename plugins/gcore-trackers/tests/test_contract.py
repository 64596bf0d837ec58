"""The trackers are held to what every observer must keep, against the real packages."""

from gcore_core.testing.conformance import contracts_of

globals().update(contracts_of("trackers"))
