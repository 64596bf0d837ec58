"""Every provider of the plugin holds its public contract."""

from gcore_testing.conformance import contracts_of

globals().update(contracts_of("offline"))
