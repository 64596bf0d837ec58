"""Step programs, and the parts that they are made of. They know no backend and no algorithm; they
hold headers and forward references. Plugins import them from ``gcore_core.kits.programs``.

A step program is a class with an async ``run()``, made from its config and a ``ControllerContext``.
Every shard runs the same program over its own groups and calls the same parts in the same order;
shard 0 is the lead. ``step_program.StepProgram`` has what all programs share: ``run``, ``train``
and ``end``. A program derives from it and says what a ``step`` is, as
``synchronous.SynchronousController`` does in six lines. The parts:

    context        ControllerContext: facts of the job, peers, agreements, algorithms
    placement      PlacementShard: who is awake in a rollout
    generation     Producer: groups from their leases to their verdicts; a step takes them
    training       Training: balance, preparation, advantages, update
    publishing     Publishing: pushes weights to the generators
    evaluation     RewardEvaluation: held-out prompts under a version of the weights
                   LossEvaluation: the objective on held-out rows, without generation
    checkpointing  Checkpointing: saves, and ``unless``, which ends work when the run is to stop
    reporting      Reporting: a step in numbers
    tracing        Stopwatch: the seconds of a step's stages

What the parts themselves are made of:

    config             SyncConfig: the settings of all parts
    algorithm_answers  calls of the job's algorithms, whose answers are checked
    reward_weights     the rewards of a group in numbers, normalised and weighted
    keep_rate          how many groups to issue where some will be dropped
    annotating         columns that other roles give of the records
    watching           Watching: brings log-probs to the step check
    checked_workers    whom a step check may ask

A program that draws the next steps while it trains on this one returns the schedule ``Ahead`` from
``make_schedule``. Before it pushes, it waits until no sample is in flight, and a checkpoint also
holds what was drawn ahead:

    taken = await self.take(step)
    trained = await self.train(step, taken, watch)
    await self.producer.drain()
    taken = self.producer.seal(taken)
    return await self.end(step, taken, trained, watch)

What is drawn so has been begun by older weights than the step that trains on it: it is stale to
the trainer, which then does not compare its log-probs with its own, and the objective must correct
for it. A step ahead needs generators with memory of their own, which do not sleep while the trainer
works. A placement policy may move devices only where nothing is in flight at a push, as where
``Producer.drain`` is called before it.
"""
