"""Environments of other packages, one module each.

Each runs in the interpreter that the job names for it, which has that package and nothing of
G-Core: a module here imports the standard library, its package and the words of authors.
"""
