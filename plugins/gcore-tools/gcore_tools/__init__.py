"""Tools around runs: plans, checks of a machine, a demonstration, jobs to begin with, small twins
of large jobs, the venvs of engines.
"""
