"""The plan of a tower, beside what a tower keeps."""

import pytest
import torch
from seeing import make_seeing, pictures

from hybrid_grpo.config import DataConfig, LoraConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.pictures import ImageStore, check_vision, trained_sight_of
from hybrid_grpo.model.loading import load_config
from hybrid_grpo.model.sight import image_token
from hybrid_grpo.run.memory.tower import NO_TOWER, tower_sizes


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava"])
def test_a_trained_tower_is_planned_as_it_is(name, tmp_path):
    processor = make_seeing(name, tmp_path)
    config, policy = load_config(str(tmp_path)), PolicyConfig(str(tmp_path), "float32", vision="trained")
    album = ImageStore(lambda: processor, image_token(config))
    assert tower_sizes(policy, LoraConfig(), config, album) == NO_TOWER
    with pytest.raises(UserError, match="no prompt has a picture"):
        check_vision(policy, album)
    [picture] = album.read([pictures()[3]], None, "row 0", DataConfig())
    for lora in (LoraConfig(), LoraConfig(rank=2)):
        sight, sizes = trained_sight_of(album, policy, lora, 0), tower_sizes(policy, lora, config, album)
        trained = sum(weight.numel() for weight in sight.weights.parameters())
        assert 0.7 * sizes.trained < trained <= sizes.trained
        adapters = sum(weight.numel() for weight in sight.adapters.parameters) if sight.adapters else 0
        assert sum(weight.numel() for weight in sight.tower.parameters()) - adapters == sizes.parameters
    sight, kept = trained_sight_of(album, policy, None, 0), dict[int, int]()
    weights = {weight.untyped_storage().data_ptr() for weight in sight.tower.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        read = sight.read(album.pixels(picture.key))
    assert len(read.rows_ND) and 0.7 < sizes.activations / sum(kept.values()) < 2
