"""The contract of a generator that goes on behind given tokens: trait ``tokens``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest, TakesTokens
from gcore_core.contract.order import FIRST_TURN
from gcore_core.contract.records import FAILED, FINISHED, TRUNCATED, Prompt
from gcore_testing.contracts.base import claims, closing
from gcore_testing.contracts.draining import Drains, key_of_request
from gcore_testing.contracts.generator import requests_of
from gcore_testing.contracts.weights import perturbed, push, read_model
from gcore_testing.safetensors_files import Tensors

#: The text of prompts whose tokens are given: nobody may read it.
_UNREAD = Prompt(row=0, text="0")


class TokensContract(Drains):
    """To test a generator, override ``provider``, or both ``generator`` and ``traits``.

    A generator that claims receives_weights and has no model directory also needs the fixture
    ``weights``. Where it claims determinism, all actions are to be equal.

    tolerance: how much log-probs may differ, in nats.
    """

    kind: ClassVar[str] = "generator"
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture
    def generator(self, context: WorkerContext) -> Iterator[Any]:
        yield from closing(self.build(replace(context, acts=True)))

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        """Gives prompts of different lengths that the model can read."""
        return [
            Prompt(row=row, text=text) for row, text in enumerate(["1+2=", "7", "12+34=", "5+6+7="])
        ]

    @pytest.fixture
    def weights(self, model: Mapping[str, Any]) -> Tensors:
        """Gives the tensors that the generator was made with, as a trainer would push them."""
        tensors = read_model(model)
        if not tensors:
            pytest.fail("give the fixture `weights`, or a `model` with safetensors")
        return tensors

    @pytest.fixture
    def wholes(self, generator: Any, prompts: list[Prompt]) -> list[Finished]:
        """Gives a greedy answer to each prompt; the generator has read the prompts as texts."""
        records = list(self.run(generator, requests_of(prompts, 1, greedy=True)).values())
        assert any(record.columns["action_ids"].size > 2 for record in records), (
            "every answer has at most two actions: let answers be longer"
        )
        return records

    # -- the tokens of a prompt --------------------------------------------------------------------

    @claims("tokens")
    def test_given_tokens_are_read_as_they_are(
        self, generator: Any, wholes: list[Finished]
    ) -> None:
        """They are the prompt, whatever its text says, also where no text has such tokens."""
        asked: list[SampleRequest] = []
        for whole in wholes:
            ids = whole.columns["prompt_ids"]
            ids = np.concatenate([ids, whole.columns["action_ids"], ids[::-1], ids])
            asked.append(_turn(len(asked), ids))
        records = self.run(generator, asked)
        for request in asked:
            columns = records[key_of_request(request)].columns
            np.testing.assert_array_equal(columns["prompt_ids"], request.ids)
            assert columns["prompt_ids"].dtype == np.int32
            assert columns["action_ids"].size == columns["action_mask"].size > 0
            assert columns["action_mask"].all(), "the actions of a turn are what was sampled"

    @claims("tokens")
    def test_an_answer_in_turns_is_one_long_answer(
        self, generator: Any, wholes: list[Finished]
    ) -> None:
        """Behind each beginning of a greedy answer the rest of it follows.

        All turns are asked for together with others, and each for itself.
        """
        asked, rests = self._turns(wholes)
        together = self.run(generator, asked)
        for request, rest in zip(asked, rests, strict=True):
            self._alike(together[key_of_request(request)].columns, rest)
        for request in asked[:: len(asked) // 3]:
            (alone,) = self.run(generator, [request]).values()
            beside = together[key_of_request(request)].columns
            self._alike(alone.columns, beside)
            if self.claimed().determinism:
                assert alone.columns["logp"].tobytes() == beside["logp"].tobytes()

    @claims("tokens")
    def test_turns_behind_a_push_are_of_the_new_weights(
        self, generator: Any, wholes: list[Finished], prompts: list[Prompt], weights: Tensors
    ) -> None:
        """What was read of a conversation under older weights is not used any more."""
        if not self.claimed().receives_weights:
            self.not_claimed("receives_weights")
        self.run(generator, self._turns(wholes)[0])
        push(generator, perturbed(weights), generator.version + 1)
        new = list(self.run(generator, requests_of(prompts, 1, greedy=True)).values())
        asked, rests = self._turns(new)
        records = self.run(generator, asked)
        for request, rest in zip(asked, rests, strict=True):
            record = records[key_of_request(request)]
            assert record.versions == (generator.version, generator.version)
            self._alike(record.columns, rest)

    @claims("tokens")
    def test_the_seed_decides_what_follows_given_tokens(
        self, generator: Any, wholes: list[Finished]
    ) -> None:
        """Two turns of one seed are alike, whatever their ordinal; of other seeds they differ."""
        if not self.claimed().determinism:
            self.not_claimed("determinism")
        ids = wholes[0].columns["prompt_ids"]
        asked = [_turn(place, ids, seed=1 + place // 2, greedy=False) for place in range(32)]
        drawn = [
            record.columns["action_ids"].tobytes()
            for _, record in sorted(self.run(generator, asked).items())
        ]
        assert drawn[::2] == drawn[1::2], "one seed has given two answers"
        assert len(set(drawn)) > 1, "all seeds give one answer"

    # -- limits and stops --------------------------------------------------------------------------

    @claims("tokens")
    def test_a_limit_ends_its_own_request_alone(
        self, generator: Any, wholes: list[Finished]
    ) -> None:
        """Its answer is the beginning of the whole one; a limit over the settings' changes none."""
        asked: list[SampleRequest] = []
        for most in (1, 2, 0, 10**6):
            for whole in wholes:
                ids = whole.columns["prompt_ids"]
                asked.append(replace(_turn(len(asked), ids), most=most))
        records = self.run(generator, asked)
        for place, request in enumerate(asked):
            record = records[key_of_request(request)]
            whole = wholes[place % len(wholes)]
            count = whole.columns["action_ids"].size
            most = min(request.most or count, count)
            self._alike(record.columns, _rest(whole, 0, most))
            assert record.columns["action_ids"].size == most
            expected = TRUNCATED if most < count else whole.status
            assert record.status == expected, f"{most} of {count} actions are {record.status!r}"

    @claims("tokens")
    def test_a_text_ends_its_own_request_alone(
        self, generator: Any, wholes: list[Finished]
    ) -> None:
        """An answer ends with the action that completes the text, which stands in it."""
        with_text = [whole for whole in wholes if _text(whole).strip("\ufffd")]
        assert with_text, "no answer has a text"
        stops = [_text(whole).strip("\ufffd")[0] for whole in with_text]
        asked: list[SampleRequest] = []
        for whole, stop in zip(with_text, stops, strict=True):
            turn = _turn(len(asked), whole.columns["prompt_ids"])
            asked += [replace(turn, stop=("never said", stop)), replace(turn, sample=1)]
        records = self.run(generator, asked)
        shorter = 0
        for whole, stop, stopped, other in zip(
            with_text, stops, asked[::2], asked[1::2], strict=True
        ):
            self._alike(records[key_of_request(other)].columns, whole.columns)
            record = records[key_of_request(stopped)]
            count = record.columns["action_ids"].size
            self._alike(record.columns, _rest(whole, 0, count))
            assert record.status == FINISHED
            assert _text(record).count(stop) == 1 or count == 1, f"{stop!r} did not end the answer"
            shorter += count < whole.columns["action_ids"].size
        assert shorter, "no text has ended an answer early"

    # -- what an environment knows of it -----------------------------------------------------------

    @claims("tokens")
    def test_it_tells_how_it_writes(self, generator: Any, prompts: list[Prompt]) -> None:
        """Answers end as it says, are no longer, and have its temperature."""
        assert isinstance(generator, TakesTokens)
        assert generator.tokenizer is not None
        assert generator.context_length >= 0
        assert 0 < generator.top_p <= 1 and generator.top_k >= 0
        for record in self.run(generator, requests_of(prompts, 6)).values():
            ids = record.columns["action_ids"]
            assert ids.size <= generator.max_actions
            if record.status == FINISHED and not record.reason:
                assert int(ids[-1]) in generator.end_ids, "an answer ends with another token"
            assert not set(ids[:-1].tolist()) & generator.end_ids, "an end token did not end it"
            temperature = generator.temperature or 1.0
            assert record.columns["temperature"] == np.float32(temperature)

    @claims("tokens")
    def test_tokens_beyond_the_context_fail_alone(
        self, generator: Any, wholes: list[Finished]
    ) -> None:
        length = generator.context_length
        if not length or length > 1_000_000:
            self.not_claimed("a context length")
        ids = wholes[0].columns["prompt_ids"]
        asked = [_turn(0, ids), _turn(1, np.resize(ids, length)), _turn(2, ids)]
        records = self.run(generator, asked)
        statuses = [records[key_of_request(request)].status == FAILED for request in asked]
        assert statuses == [False, True, False]
        assert records[key_of_request(asked[1])].reason, "a failed record must say why"

    # -- comparing ---------------------------------------------------------------------------------

    def _turns(
        self, wholes: Sequence[Finished]
    ) -> tuple[list[SampleRequest], list[dict[str, np.ndarray]]]:
        """Returns a request behind each beginning of the answers, and what is to follow there."""
        asked: list[SampleRequest] = []
        rests = []
        for whole in wholes:
            columns = whole.columns
            count = columns["action_ids"].size
            for begun in range(count):
                ids = np.concatenate([columns["prompt_ids"], columns["action_ids"][:begun]])
                asked.append(replace(_turn(len(asked), ids), most=count - begun))
                rests.append(_rest(whole, begun, count))
        return asked, rests

    def _alike(self, columns: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        """Holds actions and their log-probs to those of another answer.

        Without determinism rounding may decide between two actions that are as likely; what follows
        these is not compared. Log-probs may have other bits, as where more is read at once.
        """
        actions, logp = columns["action_ids"], columns["logp"]
        if self.claimed().determinism:
            np.testing.assert_array_equal(actions, expected["action_ids"])
        count = min(actions.size, expected["action_ids"].size)
        other = (actions[:count] != expected["action_ids"][:count]).nonzero()[0]
        shared = int(other[0]) + 1 if other.size else count
        np.testing.assert_allclose(
            logp[:shared], expected["logp"][:shared], atol=self.tolerance, rtol=0
        )


def _turn(place: int, ids: np.ndarray, *, seed: int = 1, greedy: bool = True) -> SampleRequest:
    """Asks for a turn, as an environment does."""
    return SampleRequest(
        ordinal=FIRST_TURN + place, sample=0, seed=seed, prompt=_UNREAD, greedy=greedy, ids=ids
    )


def _rest(whole: Finished, begun: int, end: int) -> dict[str, np.ndarray]:
    """Returns the actions of an answer from one place to another, and their log-probs."""
    return {name: whole.columns[name][begun:end] for name in ("action_ids", "logp")}


def _text(record: Finished) -> str:
    return record.columns["text"].tobytes().decode("utf-8", "replace")
