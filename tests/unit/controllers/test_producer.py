"""The window: what a step program sees of producing groups."""

from __future__ import annotations

from pathlib import Path

from gcore_testing.simulation import SimulatedJob, run_virtual, simulate

from gcore_core.controllers.synchronous import SynchronousController

JOB = SimulatedJob(
    shards=1, replicas=2, ranks=2, steps=4, prompts=4, samples=2, evaluate_prompts=2, scorers=1
)


class TakesOne(SynchronousController):
    """Takes the first step, and says that its weights are published."""

    async def run(self) -> None:
        await self.publishing.publish(0, 0)
        taken = await self.producer.take(0)
        assert [group[0].ordinal for group in taken.groups] == [0, 1, 2, 3]
        assert (taken.next_ordinal, taken.oldest, taken.carried) == (4, 1, [])
        assert self.producer.state()["ledger"]["next_ordinal"] == 0, "its weights are not published"
        assert set(self.producer.note_published(taken)) == {0, 1, 2, 3}
        assert self.producer.state() == taken.state


def test_a_step_that_is_taken_counts_when_its_weights_are_published(tmp_path: Path) -> None:
    run_virtual(simulate(JOB, tmp_path / "store", None, TakesOne))
