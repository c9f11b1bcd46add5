"""Answers of transformers for align.model's tests. Run by the oracle venv's python, never imported.

model_oracle.py cases DIR OUT      every DIR/<case>, a model directory with input_ids.json: logits, greedy tokens, and the config.json that
                                   transformers itself writes -> OUT.safetensors, OUT.json
model_oracle.py gguf DIR OUT.gguf  DIR/llama as a small GGUF file with all five tensor types, and transformers' own reading of it
                                   -> OUT.gguf, OUT.safetensors
model_oracle.py real DIR OUT       a converted SmolLM2-135M-Instruct: a chat prompt's ids, every 97th logit, greedy tokens
                                   -> OUT.safetensors
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)


def load(directory, **options):
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **options)
    trouble = {k: sorted(map(str, v)) for k, v in report.items() if v}
    if trouble:
        sys.exit(f"{directory}: {trouble}")
    return model.eval()


@torch.no_grad()
def answers(model, input_ids, prompt, new_tokens):
    start = input_ids[:1, :prompt]
    new = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=new_tokens, eos_token_id=None)
    again = model(new).logits[0, prompt - 1 : -1]
    top = again.topk(2).values
    print(f"  smallest margin of a greedy choice {float((top[:, 0] - top[:, 1]).min()):.2e}")
    return {"logits": model(input_ids).logits, "greedy": new[0, prompt:]}


def cases(directory, out):
    tensors, configs = {}, {}
    for path in sorted(p for p in Path(directory).iterdir() if p.is_dir()):
        print(path.name)
        ids = json.loads((path / "input_ids.json").read_text())
        model = load(path)
        for key, value in answers(model, torch.tensor(ids["input_ids"]), ids["prompt"], ids["new_tokens"]).items():
            tensors[f"{path.name}.{key}"] = value.contiguous()
        with tempfile.TemporaryDirectory() as again:
            model.save_pretrained(again)
            configs[path.name] = json.loads(Path(again, "config.json").read_text())
    save_file(tensors, f"{out}.safetensors")
    Path(f"{out}.json").write_text(json.dumps(configs, indent=1) + "\n")


def gguf(directory, out):
    import gguf as g

    config = json.loads(Path(directory, "llama", "config.json").read_text())
    ids = json.loads(Path(directory, "llama", "input_ids.json").read_text())
    weights = {}
    for path in Path(directory, "llama").glob("*.safetensors"):
        weights.update(load_file(path))
    writer = g.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    tokens = ["<s>", "</s>", *map(chr, range(0x21, 0x7B)), "Ġ", "in"]
    tokens = tokens[: config["vocab_size"] - 2] + ["Ġ", "in"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["i n"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    types = g.GGMLQuantizationType
    kinds = {
        "q_proj": types.Q4_0,
        "k_proj": types.Q8_0,
        "v_proj": types.F16,
        "up_proj": types.Q4_1,
        "down_proj": types.Q4_1,
        "gate_proj": types.Q4_0,
        "embed_tokens": types.Q8_0,
        "lm_head": types.Q8_0,
    }
    names = g.get_tensor_name_map(g.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if heads:
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        kind = kinds.get(name.split(".")[-2], types.F32)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, g.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load(Path(out).parent, gguf_file=Path(out).name)
    result = answers(model, torch.tensor(ids["input_ids"]), ids["prompt"], ids["new_tokens"])
    for tensor in g.GGUFReader(out).tensors:
        if "blk.0." in tensor.name and "norm" not in tensor.name:
            values = torch.from_numpy(g.dequantize(tensor.data, tensor.tensor_type).copy()).double()
            result[f"weight.{tensor.name}"] = values.sum().reshape(1)
            result[f"weight.{tensor.name}.squares"] = values.square().sum().reshape(1)
    save_file({k: v.contiguous() for k, v in result.items()}, f"{out.removesuffix('.gguf')}.safetensors")


def real(directory, out):
    model, tokenizer = load(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    answer = answers(model, ids, ids.shape[1], 32)
    print(tokenizer.decode(answer["greedy"]))
    logits = answer["logits"][0, :, ::97].contiguous()
    save_file({"input_ids": ids, "logits": logits, "greedy": answer["greedy"].contiguous()}, f"{out}.safetensors")


if __name__ == "__main__":
    {"cases": cases, "gguf": gguf, "real": real}[sys.argv[1]](*sys.argv[2:])
