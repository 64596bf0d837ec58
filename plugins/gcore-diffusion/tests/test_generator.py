"""What the sampler promises: its columns, its seeds, its refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gcore_testing.contracts.weights import push

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.generator import Prompt, SampleRequest
from gcore_core.contract.records import FAILED
from tests.support import diffusion_models as kit


def test_a_record_keeps_only_the_trained_positions(tiny_dir: Path) -> None:
    records = kit.sampled(kit.make_generator(tiny_dir, window=3), kit.make_requests())
    for record in records:
        columns = record.columns
        assert columns["logp"].dtype == columns["latents"].dtype == np.float32
        assert columns["latents"].shape == (4, 64)
        assert (
            columns["logp"].shape == columns["action_mask"].shape == columns["steps"].shape == (3,)
        )
        assert (np.diff(columns["steps"]) == 1).all()
        assert columns["levels"].shape == (11,) and columns["times"].shape == (10,)
        assert record.media["image"].shape == (8, 8, 1) and record.media["image"].dtype == np.uint8


def test_the_image_is_the_clean_latent(tiny_dir: Path) -> None:
    (record,) = kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(1, 1))
    expected = ((record.columns["clean"].clip(-1, 1) + 1) * 127.5).round()
    np.testing.assert_array_equal(record.media["image"].reshape(-1), expected)


def test_a_group_shares_one_condition(tiny_dir: Path) -> None:
    """The very same bytes, which the store keeps once."""
    records = kit.sampled(kit.make_generator(tiny_dir), kit.make_requests(2, 4))
    conditions = {
        r.request.ordinal: {
            x.media["condition"].tobytes()
            for x in records
            if x.request.ordinal == r.request.ordinal
        }
        for r in records
    }
    assert [len(addresses) for addresses in conditions.values()] == [1, 1]
    assert conditions[0] != conditions[1]


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(tiny_dir: Path) -> None:
    requests = kit.make_requests(3, 4)
    together = kit.sampled(kit.make_generator(tiny_dir), requests)
    apart = kit.sampled(kit.make_generator(tiny_dir, max_batch=5), requests)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.columns["latents"], other.columns["latents"], atol=1e-5)
    assert len({r.media["image"].tobytes() for r in together}) == len(together)


def test_the_same_batch_repeats_bit_for_bit(tiny_dir: Path) -> None:
    one, other = (kit.sampled(kit.make_generator(tiny_dir), kit.make_requests()) for _ in range(2))
    for first, second in zip(one, other, strict=True):
        assert first.columns["latents"].tobytes() == second.columns["latents"].tobytes()
        assert first.columns["logp"].tobytes() == second.columns["logp"].tobytes()


def test_greedy_samples_have_no_actions_and_repeat(tiny_dir: Path) -> None:
    generator = kit.make_generator(tiny_dir)
    one, other = (kit.sampled(generator, kit.make_requests(2, 2, greedy=True)) for _ in range(2))
    for first, second in zip(one, other, strict=True):
        assert first.columns["logp"].size == 0 and "latents" not in first.columns
        assert first.media["image"].tobytes() == second.media["image"].tobytes()
    assert one[0].media["image"].tobytes() != one[1].media["image"].tobytes(), "seeds still differ"


def test_same_noise_setting_starts_a_group_from_one_noise(tiny_dir: Path) -> None:
    records = kit.sampled(kit.make_generator(tiny_dir, same_noise=True), kit.make_requests(2, 3))
    firsts = [record.columns["latents"][0].tobytes() for record in records]
    assert len(set(firsts[:3])) == len(set(firsts[3:])) == 1
    assert firsts[0] != firsts[3]
    assert len({record.media["image"].tobytes() for record in records}) == 6


def test_guidance_changes_the_samples(tiny_dir: Path) -> None:
    plain, guided = (
        kit.sampled(kit.make_generator(tiny_dir, guidance=g), kit.make_requests(1, 2))
        for g in (1.0, 3.0)
    )
    assert plain[0].columns["clean"].tobytes() != guided[0].columns["clean"].tobytes()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (Prompt(row=5, text=" ", fields={"label": 1}), "the prompt is empty."),
        (
            Prompt(row=5, text="ten", fields={"label": 10}),
            "10 is no class of this model, which knows 0 to 9",
        ),
        (Prompt(row=5, messages=[{"role": "user", "content": "a"}]), "a prompt is chat messages"),
    ],
)
def test_a_prompt_that_cannot_be_read_fails_alone(
    tiny_dir: Path, prompt: Prompt, reason: str
) -> None:
    good = kit.make_requests(1, 2)
    bad = SampleRequest(ordinal=99, sample=0, seed=1, prompt=prompt)
    records = kit.sampled(kit.make_generator(tiny_dir), [*good, bad])
    assert [record.status for record in records] == ["finished", "finished", FAILED]
    assert reason in records[-1].reason and not records[-1].columns


def test_pushed_weights_are_used_and_fingerprinted(tiny_dir: Path, tmp_path: Path) -> None:
    from gcore_testing.contracts.weights import digests, exported, perturbed

    generator = kit.make_generator(tiny_dir)
    before = kit.sampled(generator, kit.make_requests(1, 1))
    other = perturbed(exported(kit.make_trainer(tiny_dir)), 0.1)
    push(generator, other, 3)
    assert generator.version == 3 and generator.fingerprint() == digests(other)
    after = kit.sampled(generator, kit.make_requests(1, 1))
    assert after[0].versions == (3, 3)
    assert before[0].columns["clean"].tobytes() != after[0].columns["clean"].tobytes()


def test_a_kind_of_noise_that_the_model_cannot_use_is_refused(
    tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="noise ddim does not go with a model that predicts flow"):
        kit.make_generator(tiny_dir, noise="ddim")
    epsilon = kit.random_tiny(tmp_path, prediction="epsilon")
    with pytest.raises(
        ConfigError, match="noise sde does not go with a model that predicts epsilon"
    ):
        kit.make_generator(epsilon)


def test_a_directory_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="model directory does not exist"):
        kit.make_generator(tmp_path / "gone")
    with pytest.raises(DataError, match="holds no model that this plugin knows"):
        kit.make_generator(tmp_path)
