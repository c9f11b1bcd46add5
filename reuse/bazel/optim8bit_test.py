"""Optimizer steps lower the loss, with two bytes of state a parameter."""

import torch

from align.optim8bit import AdamW8bit

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).bfloat16()
optimizer = AdamW8bit(model.named_parameters(), lr=1e-3, max_grad_norm=1.0, seed=0)
x = torch.randn(32, 64).bfloat16()
losses = []
for _ in range(20):
    loss = (model(x) - x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
assert optimizer.state_bytes() < 2.6 * sum(p.numel() for p in model.parameters())
