"""``python -m gcore_core`` is ``g-core``."""

from __future__ import annotations

import sys

from gcore_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
