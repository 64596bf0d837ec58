from gcore_testing.conformance import contracts_of

globals().update(contracts_of("example"))
