"""Models a rollout as a queueing system, event by event.

It models continuous batching on replicas of a policy and of judges.
"""
