"""RMSNorm equals torch's, forwards and backwards."""

import torch

from align.kernels import rms_norm

x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
weight = torch.rand(8, dtype=torch.float64)
y = rms_norm(x, weight, 1e-3)
expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-3)
assert torch.allclose(y, expected, rtol=1e-12)
grads = [torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0] for out in (y, expected)]
assert torch.allclose(*grads, rtol=1e-10)
