"""Rows that are parked when a turn ends: the next turn reads what is new, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.models import load_model
from gcore_language.tiny import EXPERT_CONFIGS, VOCABULARY, save_image_model, save_model
from gcore_testing.contracts.weights import perturbed, push, read_model
from gcore_torch.beginnings import Beginning, Beginnings, common_length
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.decoder import FusedDecoder, ImageTextDecoder, TransformersDecoder
from gcore_torch.generator import TorchGenerator
from gcore_torch.graph_decoder import GraphDecoder
from gcore_torch.products import Products
from transformers import AutoModelForCausalLM, MistralConfig

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.order import FIRST_TURN
from gcore_core.contract.records import Prompt
from tests.support import language_models as tiny

Open = Callable[..., TorchGenerator]

FUSED = ["llama", "qwen2", "qwen3"]
#: A sliding window of so many tokens, which episodes outgrow.
WINDOW = 24
_UNREAD = Prompt(row=0, text="0")


@pytest.fixture(scope="session")
def dirs(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = dict(model_dirs)
    room = tmp_path_factory.mktemp("parked")
    for family in EXPERT_CONFIGS:
        found[family] = room / family
        save_model(found[family], family)
    found["window"] = room / "window"
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(found["window"])
    tiny.save_tokenizer(found["window"])
    found["images"] = room / "images"
    save_image_model(found["images"])
    return found


@pytest.fixture
def open_generator(dirs: dict[str, Path]) -> Open:
    def make(family: str = "llama", deterministic: bool = False, **config: Any) -> TorchGenerator:
        settings = TorchGeneratorConfig(**({"max_new_tokens": 6, "max_batch": 16} | config))
        return TorchGenerator(
            settings, tiny.make_context(dirs[family], deterministic=deterministic)
        )

    return make


class Episode:
    """A conversation by ids: what was read and sampled, and then what a tool says.

    number: of the episode, from which its tools' answers follow.
    ids: the prompt of its next turn.
    """

    def __init__(self, number: int, first: int = 20) -> None:
        self.number = number
        self._draw = np.random.default_rng(number)
        self._turn = 0
        self.ids = self._draw.integers(3, 20, first).astype(np.int32)

    def ask(self) -> SampleRequest:
        return SampleRequest(
            ordinal=FIRST_TURN + 1000 * self.number + self._turn,
            sample=0,
            seed=7 * self.number + self._turn,
            prompt=_UNREAD,
            ids=self.ids,
        )

    def go_on(self, record: Finished) -> None:
        told = self._draw.integers(3, 20, self._draw.integers(1, 9)).astype(np.int32)
        self._turn += 1
        self.ids = np.concatenate([self.ids, record.columns["action_ids"], told])


def play(
    generator: TorchGenerator, episodes: Sequence[Episode], turns: int, *, pausing: bool = True
) -> list[Finished]:
    """Plays turns of episodes, which join and leave at different times; returns all records.

    pausing: whether an episode leaves a round out now and then.
    """
    records = []
    by_ordinal: dict[int, Episode] = {}
    for turn in range(turns):
        for place, episode in enumerate(episodes):
            if not pausing or (turn + place) % 3:
                request = episode.ask()
                by_ordinal[request.ordinal] = episode
                generator.submit([request])
                ended = generator.step()
                records += ended
                for record in ended:
                    by_ordinal[record.request.ordinal].go_on(record)
        for record in tiny.drain(generator):
            records.append(record)
            by_ordinal[record.request.ordinal].go_on(record)
    return records


def assert_true(directory: Path, records: Sequence[Finished], state: Any = None) -> None:
    """Holds log-probs to transformers' own forward pass over each record, in float32.

    state: weights in place of those of the directory.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if state is not None:
        model.load_state_dict(state, strict=False)
    for record in records:
        with torch.no_grad():
            expected, _ = tiny.logp_of(model, record)
        np.testing.assert_allclose(record.columns["logp"], expected, atol=1e-5, rtol=0)


def tokens_of(records: Sequence[Finished]) -> tuple[int, int]:
    """Returns how many tokens of prompts nobody had read before, and how many had been read.

    The last action of a turn is sampled in it and read in the next one.
    """
    episodes: dict[int, list[Finished]] = {}
    for record in records:
        number = (record.request.ordinal - FIRST_TURN) // 1000
        episodes.setdefault(number, []).append(record)
    new = known = 0
    for turns in episodes.values():
        read = 0
        for record in turns:
            new += len(record.columns["prompt_ids"]) - read
            known += read
            read = len(record.columns["prompt_ids"]) + len(record.columns["action_ids"]) - 1
    return new, known


def counts(generator: TorchGenerator) -> tuple[int, int]:
    """Returns how many tokens of prompts it has read, and how many it did not read again."""
    return generator._usual.read_tokens, generator._usual.kept_tokens


# -- log-probs are those of a fresh read -----------------------------------------------------------


@pytest.mark.parametrize("family", [*FUSED, "gpt2", "window", *EXPERT_CONFIGS])
def test_turns_that_go_on_from_parked_rows_have_the_log_probs_of_a_fresh_read(
    family: str, open_generator: Open, dirs: dict[str, Path]
) -> None:
    """Rows of different lengths, which join while others run, on each kind of decoder."""
    generator = open_generator(family)
    kind = FusedDecoder if family in FUSED else TransformersDecoder
    assert type(generator._usual) is kind
    records = play(generator, [Episode(n, 16 + 5 * n) for n in range(4)], turns=6)
    assert_true(dirs[family], records)
    new, known = tokens_of(records)
    assert counts(generator) == (new, known)
    assert known > 2 * new


def test_a_push_is_between_turns_and_within_one(
    open_generator: Open, dirs: dict[str, Path]
) -> None:
    """What older weights have read is read again, once, and then goes on from there."""
    generator = open_generator()
    episodes = [Episode(n, 16 + 5 * n) for n in range(3)]
    play(generator, episodes, turns=3)
    new = perturbed(read_model({"path": str(dirs["llama"])}))
    push(generator, new, 1)
    assert not generator._usual._kept.nbytes
    read = generator._usual.read_tokens
    whole = sum(len(episode.ids) for episode in episodes)
    records = play(generator, episodes, turns=1, pausing=False)
    assert generator._usual.read_tokens - read == whole
    generator.submit([episode.ask() for episode in episodes])
    generator.step()
    push(generator, new, 2)  # these run: they are read again, and parked as what they are now
    for record in tiny.drain(generator):
        episodes[(record.request.ordinal - FIRST_TURN) // 1000].go_on(record)
        records.append(record)
    known = generator._usual.kept_tokens
    records += play(generator, episodes, turns=2, pausing=False)
    assert generator._usual.kept_tokens > known
    state = {
        spec.name: torch.from_numpy(data.view(np.float32).copy()).view(spec.shape)
        for spec, data in new
    }
    assert_true(dirs["llama"], records, state)


def test_an_aborted_turn_is_asked_for_again_and_goes_on_from_the_turn_before(
    open_generator: Open, dirs: dict[str, Path]
) -> None:
    generator = open_generator()
    episodes = [Episode(n, 16 + 5 * n) for n in range(3)]
    play(generator, episodes, turns=2)
    requests = [episode.ask() for episode in episodes]
    generator.submit(requests)
    generator.step()
    (aborted,) = generator.abort([(requests[1].ordinal, 0)])
    assert aborted.status == "aborted"
    rest = list(tiny.drain(generator))
    read = generator._usual.read_tokens
    generator.submit([requests[1]])
    rest += tiny.drain(generator)
    assert generator._usual.read_tokens - read < 12  # what a tool said
    assert_true(dirs["llama"], rest)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_group_of_one_prompt_and_forks_of_one_row_read_what_is_new_alone(
    family: str, open_generator: Open, dirs: dict[str, Path]
) -> None:
    """Four samples of a prompt, which is read once; then each goes on, one of them in two ways."""
    generator = open_generator(family)
    first = Episode(0, 24).ids
    group = [
        SampleRequest(ordinal=FIRST_TURN, sample=n, seed=n, prompt=_UNREAD, ids=first)
        for n in range(4)
    ]
    generator.submit(group)
    records = list(tiny.drain(generator))
    assert generator._usual.read_tokens == len(first)
    told = [[5, 6, 7], [8, 9], [10], [11, 12], [13, 14, 15, 16]]
    parents = [*records, records[0]]
    asked = [
        SampleRequest(
            ordinal=FIRST_TURN + 1 + place,
            sample=0,
            seed=place,
            prompt=_UNREAD,
            ids=np.concatenate([first, parent.columns["action_ids"], new]).astype(np.int32),
        )
        for place, (parent, new) in enumerate(zip(parents, told, strict=True))
    ]
    generator.submit(asked)
    records += tiny.drain(generator)
    assert generator._usual.read_tokens == len(first) + sum(1 + len(new) for new in told)
    assert_true(dirs[family], records)


def test_a_history_that_was_rewritten_goes_on_from_what_is_the_same(
    open_generator: Open, dirs: dict[str, Path]
) -> None:
    """As where a template drops what the policy has thought."""
    generator = open_generator()
    episode = Episode(0, 40)
    (record,) = play(generator, [episode], turns=1, pausing=False)
    ids = record.columns["prompt_ids"]
    episode.ids = np.concatenate([ids[:30], ids[32:], [7, 8]]).astype(np.int32)
    read = generator._usual.read_tokens
    assert_true(dirs["llama"], play(generator, [episode], turns=1, pausing=False))
    same = 30 + int((ids[30:32] == ids[32:34]).cumprod().sum())
    assert generator._usual.read_tokens - read == len(ids) - same


def test_a_model_of_images_goes_on_from_rows_of_text(open_generator: Open) -> None:
    """Compared with a generator that parks nothing, since its first turns read all anew."""
    generator, plain = open_generator("images"), open_generator("images")
    assert type(generator._usual) is ImageTextDecoder
    plain._usual._may_keep = False
    records, expected = (
        play(one, [Episode(n, 16 + 5 * n) for n in range(3)], turns=3) for one in (generator, plain)
    )
    assert generator._usual.read_tokens < plain._usual.read_tokens / 1.5
    for record, fresh in zip(records, expected, strict=True):
        np.testing.assert_array_equal(record.columns["action_ids"], fresh.columns["action_ids"])
        np.testing.assert_allclose(record.columns["logp"], fresh.columns["logp"], atol=1e-5)


def test_the_decoder_of_a_gpu_goes_on_from_parked_rows(dirs: dict[str, Path]) -> None:
    """Its graphs write into rows that nobody asked for; what is parked lies elsewhere."""
    model = load_model(str(dirs["llama"]), dtype="float32")
    decoder, plain = (
        GraphDecoder(model, 8, Products(may_pack=False), may_keep=keeps) for keeps in (True, False)
    )
    both = (decoder, plain)
    first = [np.arange(20) % 17 + 3, np.arange(50) % 13 + 3]
    answers = torch.tensor([[5, 6], [7, 8], [9, 10]])
    for one in both:
        one.prefill(first, [1, 1])
        for tokens in answers:
            one.advance(tokens)
    rows = [np.concatenate([ids, answers[:, n].numpy()]) for n, ids in enumerate(first)]
    decoder.park(0, rows[0])
    decoder.park(1, rows[1])
    for one in both:
        one.drop(np.ones(2, bool))
        one.prefill([np.arange(3, 15)], [1])
        one.advance(torch.tensor([4]))
    asked = [np.concatenate([row, [11, 12, 13][: n + 2]]) for n, row in enumerate(rows)]
    logits = [one.prefill(asked, [1, 2]).clone() for one in both]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    for token in range(3, 120):  # beyond the columns of the first cache
        tokens = torch.full((4,), token % 17 + 3)
        logits = [one.advance(tokens).clone() for one in both]
        torch.testing.assert_close(*logits, atol=2e-5, rtol=0)
    assert plain.read_tokens - decoder.read_tokens == decoder.kept_tokens == 23 + 53


def test_records_of_a_later_turn_have_the_experts_of_their_whole_prompt(
    open_generator: Open,
) -> None:
    generator, plain = open_generator("qwen3_moe"), open_generator("qwen3_moe")
    plain._usual._may_keep = False
    records, expected = (
        play(one, [Episode(n, 16 + 5 * n) for n in range(3)], turns=4) for one in (generator, plain)
    )
    assert generator._usual.kept_tokens
    for record, fresh in zip(records, expected, strict=True):
        np.testing.assert_array_equal(record.columns[ROUTING], fresh.columns[ROUTING])


def test_turns_go_on_where_records_are_not_to_have_experts(open_generator: Open) -> None:
    generator = open_generator("qwen3_moe", routing="never")
    records = play(generator, [Episode(0)], turns=3, pausing=False)
    assert generator._usual.kept_tokens
    assert len(records) == 3 and not any(ROUTING in one.columns for one in records)


# -- when rows go ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_are_not_parked_any_more_after_a_sleep_or_the_end(
    family: str, open_generator: Open
) -> None:
    generator = open_generator(family)
    episodes = [Episode(n) for n in range(3)]
    play(generator, episodes, turns=2)
    assert generator._usual._kept.nbytes
    generator.sleep()
    assert not generator._usual.cache_bytes
    generator.wake()
    play(generator, episodes, turns=1)
    assert generator._usual.cache_bytes
    generator.close()
    assert not generator._usual._kept.nbytes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_larger_than_the_room_is_read_again_and_others_go_for_it(
    family: str, open_generator: Open, dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = open_generator(family)
    short, long = Episode(0, 20), Episode(1, 90)
    records = play(generator, [short], turns=1, pausing=False)
    a_row = generator._usual._kept.nbytes
    keeps = generator._usual._kept.add

    def tight(one: Any, nbytes: int) -> None:
        keeps(one, 2 * a_row)

    monkeypatch.setattr(generator._usual._kept, "add", tight)
    records += play(generator, [short, long], turns=2, pausing=False)
    assert generator._usual._kept.nbytes <= 2 * a_row
    assert_true(dirs[family], records)
    _, known = tokens_of(records)
    assert 0 < generator._usual.kept_tokens < known


def test_a_deterministic_run_parks_nothing(open_generator: Open) -> None:
    """Its log-probs are those of the trainer's forward pass, bit for bit, which reads all."""
    for family in ("llama", "gpt2"):
        generator = open_generator(family, deterministic=True)
        records = play(generator, [Episode(n) for n in range(2)], turns=2, pausing=False)
        assert records
        assert not generator._usual._kept.nbytes
        assert not generator._usual.kept_tokens


def test_samples_that_are_not_asked_for_by_ids_are_not_parked(open_generator: Open) -> None:
    generator = open_generator()
    generator.submit(tiny.make_requests())
    tiny.drain(generator)
    assert not generator._usual._kept.nbytes


# -- what is kept ----------------------------------------------------------------------------------


def beginning(*ids: int, nbytes: int = 10) -> Beginning[str]:
    return Beginning(np.array(ids), str(ids), nbytes)


def test_the_longest_beginning_is_found_among_all() -> None:
    """Compared with a look at each of them, over random ids of few kinds."""
    draw = np.random.default_rng(0)
    kept: Beginnings[str] = Beginnings(30)
    for _ in range(400):
        one = draw.integers(0, 3, draw.integers(1, 9))
        kept.add(Beginning(one, "", 10), 1000)
        ids = draw.integers(0, 3, draw.integers(1, 12))
        held = list(kept._kept.values())
        best = max(common_length(other.ids, ids[:-1]) for other in held)
        found, same = kept.longest(ids)
        assert same == best
        assert same == 0 or common_length(found.ids, ids[:-1]) == best
        assert len(held) <= 30
        assert kept.nbytes == 10 * len(held)
        for other in held:  # none begins another one
            assert sum(common_length(other.ids, that.ids) == len(other.ids) for that in held) == 1


def test_what_was_not_used_for_the_longest_time_goes_first() -> None:
    kept: Beginnings[str] = Beginnings(5)
    first, second, third = beginning(1, 2), beginning(3, 4), beginning(5, 6)
    for one in (first, second):
        kept.add(one, 20)
    kept.use(first)
    kept.add(third, 20)
    assert kept.longest(np.array([3, 4, 5])) == (None, 0)
    assert kept.longest(np.array([1, 2, 5])) == (first, 2)
    kept.add(beginning(7, nbytes=21), 20)  # it has no room in any case, so nothing goes
    assert kept.nbytes == 20
    kept.add(beginning(5, 6, 7), 20)  # in place of its own beginning
    assert kept.nbytes == 20
    kept.add(third, 20)  # a longer one is there
    assert kept.longest(np.array([5, 6, 7, 8]))[1] == 3
    kept.shrink(10)
    assert kept.longest(np.array([1, 2, 3]))[1] == 0
    kept.clear()
    assert kept.longest(np.array([5, 6, 7, 8])) == (None, 0)
    assert kept.nbytes == 0


def test_at_most_so_many_are_kept() -> None:
    kept: Beginnings[str] = Beginnings(2)
    for first in (1, 2, 3):
        kept.add(beginning(first), 1000)
    assert kept.longest(np.array([1, 9]))[1] == 0
    assert kept.nbytes == 20
