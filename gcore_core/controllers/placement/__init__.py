"""Decides which replicas are awake in a rollout, and on which devices.

    shard         PlacementShard: what step programs and windows ask, on every shard
    lead          PlacementLead: asks the policy and carries its decisions out; in the lead
    sleepers      Sleepers: puts replicas to sleep and wakes them; in the lead
    requests      the requests of a rollout, from all shards to the lead
    gauge         how much of a rollout devices were in use
    journal       decisions and what they came to, written down
    trainers      trainers that sleep while generators draw

What a rollout says of engines, and how long devices waited, the policy measures by itself.

The types are in ``gcore_core.contract.placement``. Where processes begin is decided before, in
``gcore_core.run.initial_placement``.
"""
