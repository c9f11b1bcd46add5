"""What the Trainer trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from align.model import Decoder, pick_forward_impl
from align.objectives import sft_loss
from align.train._errors import TrainError


class TrainModule:
    """A model and its loss. Stages inherit this; the Trainer knows nothing of tokens, pairs or rewards."""

    model: nn.Module
    forward_impl: str | None = None  # the name of the attention that the last loss used; recorded in checkpoints

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | float, dict[str, Tensor | float]]:
        """(the loss summed over the batch's units, how many units those are, other sums over them to be logged as means).

        A unit is what the loader counted as `trained_tokens`: a token, or a pair. Never divide here; the Trainer does, by the whole step.

        Args:
            batch: the fields of one micro-batch of the loader, arrays as tensors on the model's device; None fields are left out.
        """
        raise NotImplementedError

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer trains."""
        return self.model.named_parameters()

    def extra_state(self) -> dict[str, Any]:
        """What else a resumed run needs: tensors and JSON values by name."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `extra_state` gave."""
        if state:
            raise TrainError(
                f"the checkpoint has extra state {sorted(state)}, which this module does not take; resume it with its own stage"
            )


class SftModule(TrainModule):
    """Next-token loss of a decoder on the trained tokens: supervised fine-tuning and pretraining."""

    def __init__(self, model: Decoder, *, forward_impl: str | None = None, chunk: int | None = None) -> None:
        """`forward_impl` as in Decoder.forward, `chunk` as in align.objectives.sft_loss."""
        self.model: Decoder = model
        self._wanted, self._chunk = forward_impl, chunk

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | float, dict[str, Tensor | float]]:
        """The summed negative log-likelihood and the number of trained tokens."""
        packed = "cu_seqlens" in batch
        self.forward_impl = self._wanted or pick_forward_impl(packed=packed, like=self.model.output_weight)
        # Padded rows count positions from 0; without position_ids the decoder makes one row of angles for all.
        where = {key: batch[key] for key in ("position_ids", "cu_seqlens", "max_seqlen")} if packed else {}
        hidden = self.model(batch["input_ids"], forward_impl=self._wanted, **where)
        loss = sft_loss(hidden, self.model.output_weight, batch["targets"], batch["loss_mask"], chunk=self._chunk)
        return loss, batch["loss_mask"].sum(), {}
