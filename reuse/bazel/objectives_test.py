"""The loss of a uniform guess is ln V, and every masked position is nothing."""

import math

import torch

from align.objectives import normalise, sft_loss

hidden = torch.zeros(1, 4, 8, requires_grad=True)
weight = torch.ones(50, 8, requires_grad=True)
mask = torch.tensor([[False, True, True, False]])
loss = normalise(sft_loss(hidden, weight, torch.tensor([[7, 1, 2, -100]]), mask), 2)
assert abs(loss.item() - math.log(50)) < 1e-5
loss.backward()
