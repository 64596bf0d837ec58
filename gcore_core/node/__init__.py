"""Starts, checks and ends processes."""
