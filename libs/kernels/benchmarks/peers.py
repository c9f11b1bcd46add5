"""Other implementations in the same run, each in a process of its own: their sources are strings, no imports of this repository."""

# Liger's ops under the names of ours; `python3 -c` runs it with this folder and the peers' on the path.
LIGER = """
import json, sys, torch, workloads
from types import SimpleNamespace
from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as AddNorm
from liger_kernel.ops.rope import LigerRopeFunction as Rope
from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Silu, LigerFusedGateUpSiLUMulFunction as Packed
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Loss

workloads.use_own_stream()
cos, sin, _ = workloads.tables()
cos, sin = (torch.cat((t, t), -1)[None].bfloat16() for t in (cos, sin))

def rope(q, k):
    q, k = Rope.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q, k

ops = SimpleNamespace(
    rms_norm=lambda x, w: Norm.apply(x, w, 1e-5, 0.0, "llama", False, None),
    add_rms_norm=lambda x, r, w: AddNorm.apply(x, r, w, 1e-5, 0.0, "llama", False),
    rope=rope,
    swiglu=lambda g, u: Silu.apply(g, u),
    swiglu_packed=lambda x: Packed.apply(x),
)
def memory():
    for name in list(vars(ops)):
        try:
            for row in workloads.training_cases(SimpleNamespace(**{name: getattr(ops, name)})):
                print(json.dumps(["memory, Liger", *row]), flush=True)
        except Exception as e:
            print(json.dumps(["memory, Liger", name, "FAILED", repr(e)[:200]]), flush=True)

def beside():
    for row in workloads.alternating_cases(workloads.ours(), ops):
        print(json.dumps(["beside Liger", *row, row[4] / row[3]]), flush=True)

def loss():
    for model, tokens in (("1.44B", 16384), ("7.25B", 8192), ("7.25B", 16384)):
        op = lambda h, w, t: Loss.apply(h, w, t, None, None, -100, 0.0, 0.0, "mean")[0]
        print(json.dumps(["loss, Liger", model, tokens, *workloads.loss_case(op, workloads.MODELS[model], tokens)]), flush=True)

def wanted():
    for name in sys.argv[1:]:
        {"memory": memory, "loss": loss, "beside": beside}[name]()

workloads.rehearse(wanted)
wanted()
"""

# transformers with Liger's patches and cuDNN attention: the best measured training step of others.
HF_LIGER = """
import json, sys, torch, workloads
from liger_kernel.transformers import apply_liger_kernel_to_mistral
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralConfig, MistralForCausalLM
apply_liger_kernel_to_mistral()
m = workloads.MODELS["1.44B"]
config = MistralConfig(
    vocab_size=m.vocabulary, hidden_size=m.size, num_hidden_layers=m.layers, num_attention_heads=m.heads, num_key_value_heads=m.kv_heads,
    intermediate_size=m.inner, max_position_embeddings=32768, rope_theta=1e6, sliding_window=None, head_dim=128, tie_word_embeddings=False)
config._attn_implementation = "sdpa"
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = MistralForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.train()
def step():
    ids = torch.randint(0, m.vocabulary, (workloads.BATCH, workloads.LENGTH), device="cuda")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()
workloads.rehearse(lambda: step() and None)
print(json.dumps(["model", "HF + Liger + cuDNN", *workloads.steps(step, int(sys.argv[1]))]), flush=True)
"""
