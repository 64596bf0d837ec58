"""Decides which replicas are awake in a rollout, and on which devices."""
