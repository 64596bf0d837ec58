"""Runs a job from start to end: prepares it, places and supervises its workers, writes its results.

It leaves a directory with metrics, samples, checkpoints, a summary and weights.
"""
