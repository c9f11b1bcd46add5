"""8-bit AdamW: block-wise quantised moments, no master copy, bit-exact resume, local FSDP2 shards.

optimizer = AdamW8bit(model.named_parameters(), lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)
loss.backward()
norm = optimizer.step()  # the gradient norm before clipping
"""

from align.optim8bit import quant
from align.optim8bit._adamw import AdamW8bit, NonFiniteGradient
from align.optim8bit._layout import block_for
from align.optim8bit._state import merge_state_dicts
from align.optim8bit.quant import OptimizerError

__all__ = ["AdamW8bit", "NonFiniteGradient", "OptimizerError", "block_for", "merge_state_dicts", "quant"]
