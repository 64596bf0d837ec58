"""Tests of the core and of all distributions together; ``tests.support`` is what they share."""
