"""Models that see, against transformers alone: one family after another, tiny and random."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seeing import FAMILIES, make_seeing, pictures
from sight_proof import PROMPTS, prove_rounding, prove_sight
from tiny_architectures import tiny_architecture

from hybrid_grpo.config import DataConfig, LoraConfig, PolicyConfig
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.distributed import tensor_files
from hybrid_grpo.model.loading import load_config
from hybrid_grpo.model.lora import check_lora
from hybrid_grpo.model.processors import load_tower
from hybrid_grpo.model.sight import VisionEncoder, image_token
from hybrid_grpo.model.towers import TOWERED
from hybrid_grpo.model.trained_sight import TrainedVisionEncoder
from hybrid_grpo.model.visual_tokens import keys_of, visual_tokens, whole_until

ROUNDED = {"qwen3_5": 5e-4, "gemma4": 5e-4}
"""Relative gaps of gradients where float32 rounds more. From gradients in float64, those of Qwen3.5 are 2.5e-4 off,
transformers' own 8e-5; of Gemma 4 1e-4, transformers' own 3.4e-4."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_sees_decodes_and_learns_as_transformers_computes_it(name, tmp_path):
    gaps, sight = prove_sight(name, tmp_path)
    assert not gaps.faults(ROUNDED.get(name, 1e-5))
    shown = {id(part) for parts in PROMPTS for part in parts if not isinstance(part, str)}
    assert len(shown) == 4
    # Once to find out what is trained, then for each picture in sampling and training together, and for its gradient.
    assert sight.runs == 1 + 4 + 4


@pytest.mark.parametrize("name", ROUNDED)
def test_where_float32_rounds_more_gradients_are_as_exact_as_those_of_transformers(name, tmp_path):
    gaps, own = prove_rounding(name, tmp_path)
    assert 1e-5 < own < 1e-4 and not gaps.faults(1.5 * own)


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_a_tower_are_trained_and_merged(name, tmp_path):
    processor, policy, lora = make_seeing(name, tmp_path), PolicyConfig(str(tmp_path), "float32"), LoraConfig(rank=2)
    config = load_config(str(tmp_path))
    check_lora(lora, config, tower=True)
    album = ImageStore(lambda: processor, image_token(config))
    [picture] = album.read([pictures()[3]], None, "row 0", DataConfig())
    adapted = TrainedVisionEncoder(load_tower(policy), album.pixels, 1 << 20, album.blank, lora, 0)
    generator = torch.Generator().manual_seed(0)
    for weight in adapted.adapters.parameters:
        weight.data.normal_(std=0.05, generator=generator)
    leaf = adapted.embeddings(picture.key)
    sum((part**2).sum() for part in (leaf.rows_ND, *leaf.deep)).backward()
    gradients = adapted.gradients()
    assert len(gradients) == len(list(adapted.weights.parameters())) >= 10 and all(of.any() for of in gradients)
    tower = load_tower(policy)
    before = VisionEncoder(tower, album.pixels, torch.device("cpu"), 1).look(picture.key).rows_ND
    missing, unknown = tower.load_state_dict(adapted.state(), strict=False)
    assert not unknown and missing
    merged = VisionEncoder(tower, album.pixels, torch.device("cpu"), 1).look(picture.key).rows_ND
    torch.testing.assert_close(merged, leaf.rows_ND.detach(), rtol=1e-3, atol=1e-4)
    assert (merged - before).abs().max() > 1e-2


class Toy(torch.nn.Module):
    """A tower of one layer, which makes two embeddings of a picture, and what is added deeper."""

    config = SimpleNamespace(model_type="toy", get_text_config=lambda decoder: None)

    def __init__(self):
        super().__init__()
        self.base_model, self.unused = SimpleNamespace(get_image_features=self.features), torch.nn.Linear(2, 2)
        self.layer = torch.nn.Linear(3, 4, bias=False)

    def features(self, pixels, return_dict):
        rows = self.layer(pixels)
        return SimpleNamespace(pooler_output=[rows], deepstack_features=[[rows * rows]])


def toy_pixels(key):
    return {"pixels": torch.arange(6.0).view(2, 3) + key}


BYTES = 4 * 2 * (2 * 4)
"""Of what the toy makes of a picture."""


@pytest.mark.parametrize("seed", range(4))
def test_looks_are_those_of_the_present_weights_and_the_latest_are_kept(seed):
    """Against a list of the pictures that were looked at: whatever changes the weights, all are looked at anew."""
    draw, tower = random.Random(seed), Toy()
    sight = VisionEncoder(tower, toy_pixels, torch.device("cpu"), 3 * BYTES + 5)
    kept, runs, saved = [], 0, {name: of.clone() for name, of in sight.saved().items()}
    for _ in range(60):
        act = draw.choice(["look"] * 8 + ["blend", "restore"])
        if act == "blend":
            sight.blend({"layer.weight": torch.full((4, 3), draw.random())}, 0.5)
        elif act == "restore":
            sight.restore(saved)
        else:
            runs, kept = runs + ((key := draw.randrange(5)) not in kept), [*(k for k in kept if k != key), key][-3:]
            look, rows = sight.look(key), tower.layer(**{"input": toy_pixels(key)["pixels"]})
            assert torch.equal(look.rows_ND, rows) and torch.equal(look.deep[0], rows * rows)
            continue
        kept = []
    assert sight.runs == runs
    large = VisionEncoder(tower, toy_pixels, torch.device("cpu"), 1)
    assert [large.look(k).rows_ND[0, 0].item() for k in (1, 1, 2)] and large.runs == 2, "one that is too large is kept"


def test_a_trained_tower_has_the_gradient_of_every_place_of_a_picture_once():
    sight = TrainedVisionEncoder(Toy(), toy_pixels, 10**6, toy_pixels(0), None, 0)
    assert list(sight.state()) == ["layer.weight"], "what no picture reaches is not trained"
    for step in range(2):
        # Three micro-batches; the picture 3 is in two of them, the picture 7 only in one, and only deeper.
        for key, deep in ((3, 1.0), (3, 2.0), (7, 0.5)):
            look = sight.embeddings(key)
            (deep * look.deep[0].sum() + (look.rows_ND**3).sum() * (key == 3)).backward()
        weight = sight.tower.layer.weight.detach().clone().requires_grad_()
        three, seven = (toy_pixels(key)["pixels"] @ weight.T for key in (3, 7))
        (expected,) = torch.autograd.grad(3 * (three**2).sum() + 2 * (three**3).sum() + 0.5 * (seven**2).sum(), weight)
        (found,) = sight.gradients()
        torch.testing.assert_close(found, expected)
        assert not sight.gradients()[0].any(), "it was given out"
        (sight.embeddings(3).rows_ND.sum() * 5).backward()
        [trained] = sight.weights.parameters()
        sight.follow({trained: torch.full((4, 3), 0.25 + step)})
        assert torch.equal(sight.embeddings(3).rows_ND.detach(), sight.tower.layer(toy_pixels(3)["pixels"]).detach())
        assert sight.tower.layer.weight[0, 0].item() == 0.25 + step and not sight.gradients()[0].any()


def test_the_tower_of_a_moving_average_moves_in_bfloat16_and_from_a_checkpoint_too(tmp_path):
    """Rounded to bfloat16 after every step of 1 % of a difference of 5 %, the weights never moved."""
    make_seeing("qwen2_5_vl", tmp_path)

    def sight(dtype: str) -> VisionEncoder:
        return VisionEncoder(load_tower(PolicyConfig(str(tmp_path), dtype)), lambda key: {}, torch.device("cpu"), 1)

    def go(moved: VisionEncoder, steps: int) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            moved.blend(target, 0.01)
        return {name: moved.tower.state_dict()[name].clone() for name in target}

    rounded, resumed, exact = sight("bfloat16"), sight("bfloat16"), sight("float32")
    start = {name: weight.detach().clone() for name, weight in rounded.tower.named_parameters()}
    target = {name: 1.05 * weight for name, weight in start.items()}
    exact.tower.load_state_dict(start, strict=False)
    tensor_files.write(rounded.saved(), tmp_path / "old.pt")
    go(rounded, 150)
    tensor_files.write(rounded.saved(), tmp_path / "middle.pt")
    end, in_float32 = go(rounded, 150), go(exact, 300)
    assert all(torch.equal(end[name], in_float32[name].bfloat16()) for name in target)
    assert sum(bool((end[name] != start[name]).any()) for name in target) > 8
    for file, steps in (("middle.pt", 150), ("old.pt", 300)):
        resumed.restore(tensor_files.read(tmp_path / file))
        assert all(torch.equal(of, end[name]) for name, of in go(resumed, steps).items()), file
    resumed.blend(target, 1.0)
    assert {of.dtype for of in resumed.saved().values() if of.is_floating_point()} == {torch.bfloat16}, "a copy"


@pytest.mark.parametrize("name", TOWERED)
def test_every_model_with_a_tower_has_an_album_also_if_it_is_trained_on_text_alone(name):
    album = ImageStore.of("nowhere", tiny_architecture(name))
    assert album is not None and album.empty


def test_pictures_are_read_whole_and_told_apart():
    one, two = visual_tokens(5, 3), visual_tokens(2**45 - 1, 2)
    tokens = [7, *one, 8, *two, *one[:2], 9, one[2], 4]
    assert keys_of(tokens) == [5, 2**45 - 1, 5] and all(token < 0 for token in one + two)
    assert [whole_until(tokens, end) for end in (0, 1, 2, 3, 4, 6, 8, 10, 11)] == [0, 1, 4, 4, 4, 7, 11, 11, 11]
    assert np.array(two).dtype == np.int64
