"""Reads what is installed, and what a YAML file chose of it.

    catalog             which plugins are installed, without importing any
    plugins             Plugins: imports the chosen ones and calls their hooks
    yaml_source         the YAML file and its overrides, and where each value came from
    schema              the classes of the core's settings, as a tree
    plan                Plan: a file resolved, with every provider and its settings
    default_balancer    what ``balance.use: auto`` stands for
    default_sentinel    what ``sentinel.use: auto`` stands for
    checks              what must hold between the values of a plan
    interpreters        what another Python has installed
    venvs               which interpreter ``venv:NAME`` is
    user_functions      functions in Python files of the user

``plan.load_plan`` is where a job is read; it calls the others.
"""
