from gcore_core.testing.conformance import contracts_of

globals().update(contracts_of("example"))
