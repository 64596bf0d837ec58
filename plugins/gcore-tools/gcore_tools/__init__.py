"""Tools around runs: jobs to begin with, small twins of large jobs, the venvs of engines."""
