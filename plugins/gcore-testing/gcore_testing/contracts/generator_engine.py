"""The half of a generator's contract about its engine: claims, weights and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.generator import (
    SampleRequest,
)
from gcore_core.contract.records import TensorSpec, WeightPlan
from gcore_core.contract.traits import methods_of, protocols_of
from gcore_testing.contracts.base import claims
from gcore_testing.contracts.draining import Drains
from gcore_testing.contracts.weights import digests, load, perturbed, push, read_model
from gcore_testing.safetensors_files import Tensors

if TYPE_CHECKING:
    from gcore_core.contract.generator import Finished

#: Trait -> the protocol that keeps it.
_PROTOCOLS = protocols_of("generator")


class EngineTests(Drains):
    """Tests of the engine, which are mixed into ``GeneratorContract``.

    returns_late: whether a sample may end before a push and be returned after it, since the engine
        goes on by itself between calls of ``step``, or holds ended samples back.
    """

    returns_late: ClassVar[bool] = False

    @pytest.fixture
    def weights(self, model: Mapping[str, Any]) -> Tensors:
        """Gives the tensors that the generator was made with, as a trainer would push them.

        By default they are read from its model directory.
        """
        tensors = read_model(model)
        if not tensors:
            pytest.fail(
                "receives_weights is claimed: give the fixture `weights`, or a `model` with "
                "safetensors"
            )
        return tensors

    @pytest.mark.parametrize("trait", _PROTOCOLS)
    def test_a_claim_is_implemented_and_nothing_else(self, generator: Any, trait: str) -> None:
        """The methods of a trait that is not claimed are absent, or they raise.

        A method that does nothing would look like one that works.
        """
        protocol = _PROTOCOLS[trait]
        if getattr(self.claimed(), trait):
            assert isinstance(generator, protocol), (
                f"{trait} is claimed, {protocol.__name__} is not implemented"
            )
            return
        present = [method for method in methods_of(protocol) if hasattr(generator, method)]
        for method in present:
            with pytest.raises(Exception, match=r"(?s).+"):
                getattr(generator, method)(*_ARGUMENTS.get(method, ()))
        self.not_claimed(trait)

    def test_abort_works_or_refuses(self, generator: Any, requests: list[SampleRequest]) -> None:
        """``abort`` is in the protocol, so without the claim it must raise."""
        if self.claimed().abort:
            assert generator.abort([]) == []
            return
        generator.submit(requests[:1])
        with pytest.raises(Exception, match=r"(?s).+"):
            generator.abort([(requests[0].ordinal, requests[0].sample)])
        self.not_claimed("abort")

    # -- weights -----------------------------------------------------------------------------------

    @claims("receives_weights")
    def test_a_record_names_the_version_that_sampled_it(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        before = generator.version
        assert {record.versions for record in self.run(generator, requests).values()} == {
            (before, before)
        }
        push(generator, weights, before + 3)
        assert generator.version == before + 3
        expected = (before + 3, before + 3)
        assert {record.versions for record in self.run(generator, requests).values()} == {expected}

    @claims("receives_weights")
    def test_other_weights_give_other_samples_and_the_old_ones_the_old(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        before = self.run(generator, requests)
        push(generator, perturbed(weights), generator.version + 1)
        assert not self._same(before, self.run(generator, requests)), "the push changed nothing"
        push(generator, weights, generator.version + 1)
        assert self._same(before, self.run(generator, requests)), (
            "the old weights do not give the old samples"
        )

    def _same(self, one: Mapping[Any, Finished], other: Mapping[Any, Finished]) -> bool:
        """Says whether two batches were sampled by the same weights.

        Under determinism, all log-probs are bitwise equal. Otherwise, wherever the first
        actions are equal, their log-probs agree within ``tolerance``; at least one must be equal.
        """
        if self.claimed().determinism:
            return all(
                one[k].columns["logp"].tobytes() == other[k].columns["logp"].tobytes() for k in one
            )
        gaps = [
            abs(float(one[key].columns["logp"][0]) - float(other[key].columns["logp"][0]))
            for key in one
            if one[key].columns["action_ids"][0] == other[key].columns["action_ids"][0]
        ]
        return bool(gaps) and max(gaps) <= self.tolerance

    @claims("receives_weights")
    def test_samples_that_run_through_a_push_say_so(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """Their versions are the first and the last that sampled them.

        Log-probs of actions that older weights sampled stay those of the older weights.
        """
        before = generator.version
        undisturbed = self.run(generator, requests)
        with self.held(generator):
            generator.submit(requests)
            ended = [record for _ in range(2) for record in generator.step()]
            push(generator, perturbed(weights), before + 1)
        later = self.drain(generator, requests, ended)
        assert {record.versions for record in ended} <= {(before, before)}
        assert later, "everything ended within two steps: let samples be longer"
        versions = {record.versions for record in later}
        assert (before, before + 1) in versions, "no sample says that older weights began it"
        # A sample that still waited at the push has only the new version.
        allowed = {(before, before + 1), (before + 1, before + 1)}
        assert versions <= allowed | ({(before, before)} if self.returns_late else set())
        first_logp = {
            (ordinal, int(record.columns["action_ids"][0])): record.columns["logp"][:1]
            for (ordinal, _), record in undisturbed.items()
        }
        for record in later:
            if record.versions[0] > before:
                continue
            if self.claimed().determinism:
                key = (record.request.ordinal, record.request.sample)
                same = record.columns["logp"][0] == undisturbed[key].columns["logp"][0]
            else:  # another sample that begins alike tells what the older weights say
                action = (record.request.ordinal, int(record.columns["action_ids"][0]))
                told = record.columns["logp"][:1]
                same = (abs(told - first_logp.get(action, told)) <= self.tolerance).all()
            assert same, "a log-prob is not of the weights that sampled its action"

    @claims("receives_weights")
    def test_an_older_push_is_refused(self, generator: Any, weights: Tensors) -> None:
        push(generator, weights, generator.version + 5)
        version = generator.version
        with pytest.raises(WeightMismatch):
            generator.begin_weights(WeightPlan(version - 1, [spec for spec, _ in weights]))
        assert generator.version == version

    @claims("receives_weights")
    @pytest.mark.parametrize(
        "change", ["a tensor is missing", "one is unknown", "one has another shape"]
    )
    def test_a_push_of_another_model_is_refused(
        self, generator: Any, weights: Tensors, change: str
    ) -> None:
        specs = [spec for spec, _ in weights]
        first = specs[0]
        wide = TensorSpec(
            first.name, first.dtype, (*first.shape[:-1], first.shape[-1] * 2), first.nbytes * 2
        )
        plans = {
            "a tensor is missing": specs[1:],
            "one is unknown": [*specs, TensorSpec("another.model", "F32", (1,), 4)],
            "one has another shape": [wide, *specs[1:]],
        }
        with pytest.raises(WeightMismatch) as raised:
            generator.begin_weights(WeightPlan(generator.version + 1, plans[change]))
        tensor = "another.model" if change == "one is unknown" else first.name
        assert tensor in str(raised.value), f"the error must name the tensor {tensor!r}"

    @claims("receives_weights")
    def test_weights_that_came_by_half_are_never_sampled_from(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """After a push that broke off ``step`` raises, or samples from the whole old weights."""
        before = self.run(generator, requests)
        new = perturbed(weights)
        plan = WeightPlan(generator.version + 1, [spec for spec, _ in new])
        generator.begin_weights(plan)
        load(generator, new[: (len(new) + 1) // 2])
        generator.submit(requests)
        try:
            ended = generator.step()
        except Exception:  # whatever it raises ends the run
            ended = None
        if ended is not None:
            after = {
                (r.request.ordinal, r.request.sample): r
                for r in [*ended, *self.drain(generator, requests, ended)]
            }
            assert self._same(before, after), "samples are of weights that came by half"
            generator.submit(requests)
        push(generator, new, plan.version)
        self.drain(generator, requests)

    @claims("fingerprints")
    def test_the_fingerprint_is_that_of_the_pushed_bytes(
        self, generator: Any, weights: Tensors
    ) -> None:
        for version, pushed in enumerate(
            (weights, perturbed(weights)), start=generator.version + 1
        ):
            push(generator, pushed, version)
            assert generator.fingerprint() == digests(pushed)

    @claims("fingerprints")
    def test_a_half_loaded_push_shows_in_the_fingerprint(
        self, generator: Any, weights: Tensors
    ) -> None:
        """The fingerprint is not that of the new weights until all of them are committed."""
        new = perturbed(weights)
        plan = WeightPlan(generator.version + 1, [spec for spec, _ in weights])
        generator.begin_weights(plan)
        load(generator, new[: len(new) // 2])
        assert generator.version < plan.version, "an uncommitted push set the version"
        assert generator.fingerprint() != digests(new)
        push(generator, new, plan.version)
        assert generator.fingerprint() == digests(new)


#: Arguments with which a method that is not claimed is called; it must raise.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "logprobs": ([],),
    "begin_weights": (WeightPlan(1, []),),
    "load_weights": ([],),
    "commit_weights": (WeightPlan(1, []),),
}
