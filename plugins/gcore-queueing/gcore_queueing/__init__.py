"""A rollout as a queueing model: continuous batching on replicas of a policy and of judges, event
by event.
"""
