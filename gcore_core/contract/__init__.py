"""Holds the words of plugins: hooks, descriptions, protocols and what they pass to each other.

It imports nothing else of the project. ``gcore_core.kits`` lists what plugins may use besides.
"""
