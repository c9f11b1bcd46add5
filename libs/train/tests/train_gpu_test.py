"""Two ranks over NCCL: what ranks_test.py asks of gloo. On one GPU both ranks share it (tools/py/gpu_ranks.py), a rehearsal that prints so.

All runs are in deterministic mode, which bit-equality on a GPU needs.
"""

from pathlib import Path

import gpu_ranks
import pytest
import requires
import torch
from train_cases import on_ranks

pytestmark = pytest.mark.gpu
PROGRAM = str(Path(__file__).with_name("ranks_test.py"))
KINDS = ("adamw8bit", "offload")


@pytest.fixture
def devices():
    requires.gpu(torch.cuda.is_available())
    found = torch.cuda.device_count()
    print(gpu_ranks.described(2, found))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_nccl_ranks_stopped_at_every_step_and_resumed_three_legs(tmp_path, devices, kind):
    on_ranks(2, PROGRAM, "legs", tmp_path, kind, devices=devices)


def test_saved_on_two_nccl_ranks_loaded_on_one_and_back(tmp_path, devices):
    """1 -> 2 -> 1: the same bits in every file."""
    on_ranks(1, PROGRAM, "alone", tmp_path, *KINDS, devices=devices)
    on_ranks(2, PROGRAM, "resharded", tmp_path, *KINDS, devices=devices)
    on_ranks(1, PROGRAM, "loads on one", tmp_path, *KINDS, devices=devices)


def test_a_gradient_that_is_not_finite_on_one_nccl_rank_is_skipped_on_both(tmp_path, devices):
    on_ranks(2, PROGRAM, "skips alike", tmp_path, devices=devices)
