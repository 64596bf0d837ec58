"""Decides which replicas are awake in a rollout, and on which devices.

    shard         PlacementShard: what step programs and ``Producer`` ask, on every shard
    lead          PlacementLead: asks the policy and carries its decisions out; in the lead
    sleepers      Sleepers: puts replicas to sleep and wakes them; in the lead. Also trainers
    measurements  the requests of a rollout, and how much of it devices were in use; in the lead

What a rollout says of engines, and how long devices waited, the policy measures by itself.

The types are in ``gcore_core.contract.placement``. Where processes begin is decided before, in
``gcore_core.run.initial_placement``.
"""
