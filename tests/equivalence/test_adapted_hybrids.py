"""Adapters of models with recurrent layers: packs equal peft's model on each sequence alone."""

import pytest
import torch
from adapters import assert_same, by_peft, in_a_pack, trained_adapter
from hybrids import HYBRIDS, tiny_hybrid, two_rows
from models import embedded_model
from transformers import AutoTokenizer

# In Mamba layers, peft does not adapt out_proj, whose weight the kernels read.
TARGETS = {
    "qwen3_5_text": ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj"],
    "granitemoehybrid": ["in_proj", "q_proj", "input_linear"],
    "lfm2": ["in_proj", "out_proj", "q_proj", "w1"],
}
OF_RECURRENT_LAYERS = (".linear_attn.", ".mamba.", ".conv.")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in TARGETS if name in HYBRIDS])
def test_packed_logps_and_gradients_equal_peft_on_each_sequence_alone(family, tmp_path):
    folder = tmp_path / "base"
    tiny_hybrid(family, vocab_size=2048, eos_token_id=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_model()).save_pretrained(folder)
    adapter = trained_adapter(folder, tmp_path / "adapter", target_modules=TARGETS[family])
    preferences = [preference for row in two_rows() for preference in row]
    found = in_a_pack(folder, adapter, preferences)
    assert_same(found, by_peft(folder, adapter, preferences), atol=5e-5, rtol=1e-4)
    recurrent = [g for name, g in found.gradients.items() if any(one in name for one in OF_RECURRENT_LAYERS)]
    assert recurrent and all(torch.any(gradient) for gradient in recurrent)
