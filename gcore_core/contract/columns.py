"""Defines columns: the arrays of one record, by name.

``gcore_core.contract.records`` lists those of records whose actions are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Columns = Mapping[str, np.ndarray]
