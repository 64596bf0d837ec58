"""One contract class for each kind of provider. A subclass whose name begins with ``Test`` is a
test file's content.
"""

from __future__ import annotations

import pkgutil

import pytest

pytest.register_assert_rewrite(
    *(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}."))
)
