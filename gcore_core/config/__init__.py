"""Reads what is installed, and what a YAML file chose of it."""
