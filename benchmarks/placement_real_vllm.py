"""Measures placement policies on real engines of vLLM: ``placement_real.py --engines vllm``."""

from __future__ import annotations

import sys

from placement_real import main

if __name__ == "__main__":
    sys.exit(main(["--engines", "vllm", *sys.argv[1:]]))
