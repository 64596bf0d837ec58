"""Faults of RL trainers that were reported in public, planted into small runs of G-Core."""
