"""The plugin ``jobs`` brings jobs to begin with, as files: ``jobs/<algorithm>.yaml``.

``gcore.train(algorithm="grpo")`` fills one with a model, rows and rewards. It has no hooks.
"""

from __future__ import annotations
