"""The decoder on a GPU: fp32 against the CPU, bf16 within its rounding, and the cache without a look at the positions."""

import pytest
import requires
import torch
from model_cases import CASES, build, input_ids

from align.model import Decoder, ModelError, Stepper, init, lay_side_by_side, load, save

pytestmark = pytest.mark.gpu
WINDOWED = "mistral_window"


@pytest.fixture(autouse=True)
def device():
    requires.gpu(torch.cuda.is_available())
    torch.backends.cuda.matmul.allow_tf32 = False


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().cpu().float() - b.detach().cpu().float()).abs().max())


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_equal_the_cpu(name, joint):
    on_cpu, on_gpu, ids = build(name), build(name).cuda(), input_ids(name)
    if joint:
        lay_side_by_side(on_gpu)
    ends = torch.tensor([0, 13, 14, 52, 80, 80], dtype=torch.int32)
    upstream = torch.linspace(-1, 1, on_cpu.config.hidden_size)
    for arguments in ({}, {"cu_seqlens": ends}):
        hidden, expected = on_gpu(ids.cuda(), **{k: v.cuda() for k, v in arguments.items()}), on_cpu(ids, **arguments)
        assert distance(on_gpu.lm_head(hidden), on_cpu.lm_head(expected)) <= 2e-5
        (hidden * upstream.cuda()).sum().backward(), (expected * upstream).sum().backward()
    for (parameter_name, ours), theirs in zip(on_gpu.named_parameters(), on_cpu.parameters(), strict=True):
        if theirs.grad is not None:
            assert distance(ours.grad, theirs.grad) <= 1e-4 * max(1.0, float(theirs.grad.abs().max())), parameter_name


@pytest.mark.parametrize("name", ["llama3", WINDOWED, "qwen2_window", "qwen3"])
def test_cache_and_stepper(name):
    model, ids = build(name).cuda().requires_grad_(False), input_ids(name).cuda()
    whole = model(ids)
    cache, ragged = model.new_cache(2, 40), model.new_cache(2, 40)
    pieces = torch.cat([model(ids[:, a:b], cache=cache) for a, b in ((0, 9), (9, 10), (10, 30), (30, 40))], 1)
    assert distance(pieces, whole) <= 2e-5 and cache.length == 40
    with torch.inference_mode():
        model(ids[:, :20], cache=ragged)
        stepper, lengths = Stepper(model, 2, 40), torch.tensor([5, 20], device="cuda")
        stepper.enter(0, cache, torch.tensor([0, 1], device="cuda"), lengths.tolist())
        for step in range(15):
            positions = lengths + step
            tokens = ids.gather(1, positions[:, None])
            rows = torch.stack([whole[0, positions[0]], whole[1, positions[1]]])
            assert distance(model(tokens, position_ids=positions[:, None], cache=ragged)[:, 0], rows) <= 2e-5
            logits = stepper(tokens[:, 0], positions, int(positions.max()) + 1)
            assert distance(logits, model.lm_head(rows)) <= 2e-5 * max(1.0, float(logits.abs().max()))
    assert ragged.length is None
    with pytest.raises(ModelError, match="the length of this cache is not known"):
        model(ids[:, :1], cache=ragged)


def test_bfloat16_is_near_fp32():
    model, ids = init(build("qwen3").config, 0).cuda().requires_grad_(False), input_ids("qwen3").cuda()
    logits = model.lm_head(model(ids))
    half = model.to(torch.bfloat16)
    for arguments in ({}, {"cu_seqlens": torch.tensor([0, 40, 80], device="cuda")}):
        assert distance(half.lm_head(half(ids, **arguments)), logits) <= 0.02 * float(logits.abs().max())


def test_load_goes_straight_to_the_device(tmp_path):
    save(build("llama"), tmp_path)
    model = load(tmp_path, device="cuda")
    assert isinstance(model, Decoder) and {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert distance(model(input_ids("llama").cuda()), build("llama")(input_ids("llama"))) <= 2e-5
    save(model, tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").output_weight, model.output_weight.cpu())
