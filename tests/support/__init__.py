"""What several tests share: ``from tests.support import runs``, in a plugin's tests too.

The repository's root is on pytest's path (``pythonpath`` in pyproject.toml), so a module of this
package is imported like any other: it exists once in a process, also under pytest-xdist.
"""
