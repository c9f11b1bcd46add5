"""A decoder is made, saved, read back equal, and its cache gives the token that the whole forward gives."""

import tempfile

import torch

from align.model import ModelConfig, init, load, save

config = ModelConfig(model_type="mistral", vocab_size=100, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
model = init(config, seed=0)
input_ids = torch.arange(40).view(2, 20)
with torch.inference_mode():
    whole = model.lm_head(model(input_ids))
    cache = model.new_cache(batch=2, max_length=32)
    model(input_ids[:, :19], cache=cache)
    last = model.lm_head(model(input_ids[:, 19:], cache=cache))
    assert torch.allclose(last[:, 0], whole[:, -1], atol=1e-5)
    folder = tempfile.mkdtemp()
    save(model, folder)
    assert torch.equal(load(folder).lm_head(load(folder)(input_ids)), whole)
