"""One run from start to end: preparing it, placing and supervising its workers, and what it leaves.

It leaves a directory with metrics, samples, checkpoints, a summary and weights.
"""
