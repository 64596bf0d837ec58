"""The trackers are held to what every observer must keep, against the real packages."""

import pytest
from gcore_testing.conformance import contracts_of

pytestmark = pytest.mark.slow  # most of it is one database of MLflow, which runs make too

globals().update(contracts_of("trackers"))
