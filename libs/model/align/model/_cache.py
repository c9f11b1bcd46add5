"""Keys and values of the positions that were already read."""

import torch
from torch import Tensor


class KVCache:
    """Keys `k` and values `v`, each (layers, B, max_length, key heads, head_dim), allocated once; made by `Decoder.new_cache`.

    A cache belongs to the weights that filled it. `length` counts the positions that a forward without position_ids continues after;
    None once it is not known (position_ids were given on a GPU).
    """

    def __init__(self, k: Tensor, v: Tensor, length: int | None = 0) -> None:
        self.k, self.v, self.length = k, v, length

    @property
    def max_length(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def select(self, rows: Tensor) -> "KVCache":
        """A copy that holds these rows, (N,) int64, in this order: to drop finished rows, or to repeat one prompt for a group."""
        with torch.inference_mode(self.k.is_inference()):
            return KVCache(self.k.index_select(1, rows), self.v.index_select(1, rows), self.length)
