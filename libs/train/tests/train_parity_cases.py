"""Models, rows and settings of 50 steps that transformers takes as well, and the comparison with its answers."""

import collections
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from train_cases import made

from align.data import Encoded, Example
from align.model import Decoder, ModelConfig
from align.model import save as save_model
from align.tracking import read_history
from align.train import (
    LoraConfig,
    ScheduleConfig,
    SftModule,
    adapter_config,
    adapter_tensors,
    add_lora,
    learning_rate,
    lora_parameters,
    merge_lora,
)

STEPS, LR = 50, 1e-3
SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "mistral": ModelConfig(model_type="mistral", sliding_window=8, **SHAPE),
    "llama": ModelConfig(model_type="llama", rope_scaling=LLAMA3, **SHAPE),
    "qwen3": ModelConfig(model_type="qwen3", head_dim=16, tie_word_embeddings=True, **SHAPE),
}
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=5, min_lr_ratio=0.1)


def mixed(z):
    """Numbers of -1 to 1 from integers below 2**31 (a hash of 32 bits, lowbias32 by C. Wellons)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        z = (z ^ (z >> shift)) * factor & 0xFFFFFFFF
    return (z ^ (z >> 16)).double() / 2**31 - 1


def model_of(case):
    """Weights are a function of their place, so that no version of torch can change them."""
    model = Decoder(CASES[case])
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.named_parameters()):
            noise = mixed(torch.arange(parameter.numel()) + (number << 20)).view_as(parameter)
            parameter.copy_(0.1 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    return model


def examples():
    """Eight documents that fill four packed rows of 16."""
    found = []
    for number, length in enumerate((12, 4, 11, 5, 9, 7, 13, 3)):
        ids = (torch.arange(length, dtype=torch.int32) * (3 + number) + 7 * number) % SHAPE["vocab_size"]
        found.append(Example(ids.numpy(), (torch.arange(length) >= length // 3).numpy()))
    return found


def rows():
    made_of = examples()
    digest = hashlib.sha256(repr([each.ids.tolist() for each in made_of]).encode()).hexdigest()
    trained = sum(int(each.mask[1:].sum()) for each in made_of)
    return Encoded(made_of, len(made_of), collections.Counter(), 0, sum(len(each.ids) for each in made_of), trained, digest)


LORA = LoraConfig(rank=4, alpha=12.0, targets=["q_proj", "v_proj", "o_proj", "down_proj"])


def adapted(case):
    """The case's model with an adapter that is a function of its place, too."""
    model = model_of(case)
    add_lora(model, LORA, seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(lora_parameters(model)):
            parameter.copy_(0.2 * mixed(torch.arange(parameter.numel()) + (number << 22)).view_as(parameter))
    return model


def write_adapter(model, folder):
    """The adapter's two files, as a checkpoint has them."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(LORA)))
    save_file({name: tensor.contiguous() for name, tensor in adapter_tensors(model).items()}, folder / "adapter_model.safetensors")


def compare_adapter(answers):
    """Logits of the adapted model and of the merged one, within 1e-5 of peft's."""
    for case in CASES:
        model, ids = adapted(case), torch.arange(12)[None] * 7 % SHAPE["vocab_size"]
        for name in ("logits", "merged"):
            with torch.no_grad():
                ours = model.lm_head(model(ids))[0, ::3, ::8]
            assert (ours - torch.tensor(answers[case][name])).abs().max() <= 1e-5, (case, name)
            merge_lora(model)


def write(folder):
    """What the oracle reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        save_model(model_of(case), folder / case)
        write_adapter(adapted(case), folder / "adapters" / case)
    told = {
        "cases": list(CASES), "rows": [[each.ids.tolist(), each.mask.tolist()] for each in examples()], "weight_decay": 0.1,
        "rates": [learning_rate(SCHEDULE, LR, step, STEPS) for step in range(STEPS)], "betas": [0.9, 0.95], "eps": 1e-8,
        "max_grad_norm": 1.0,
    }  # fmt: skip
    (folder / "rows.json").write_text(json.dumps(told))


def compare(tmp_path, answers):
    for case, packing in [(case, packing) for case in CASES for packing in (False, True)]:
        trainer, run, module = made(
            tmp_path / f"{case}{packing}", module=lambda _, case=case: SftModule(model_of(case)), data=rows(), packing=packing,
            dtype=torch.float32, train__max_steps=STEPS, train__global_batch=4 if packing else 8, train__micro_batch=2,
            optimizer__name="adamw", optimizer__lr=LR, optimizer__weight_decay=0.1, schedule=SCHEDULE,
        )  # fmt: skip
        trainer.fit()
        lines = read_history(run.path / "history.jsonl")
        assert [line["loss"] for line in lines] == pytest.approx(answers[case]["losses"], abs=1e-5), (case, packing)
        assert [line["grad_norm"] for line in lines] == pytest.approx(answers[case]["norms"], rel=2e-3), (case, packing)
        for name, parameter in module.model.named_parameters():
            some = parameter.detach().flatten()[:: max(1, parameter.numel() // 8)][:8].tolist()
            assert some == pytest.approx(answers[case]["weights"][name], abs=1e-5), (case, packing, name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
