"""There is one contract class for each kind of provider.

A test file contains a subclass of one of them, whose name begins with ``Test``.
"""

from __future__ import annotations

import pkgutil

import pytest

pytest.register_assert_rewrite(
    *(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}."))
)
