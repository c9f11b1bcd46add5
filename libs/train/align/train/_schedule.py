"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from align.train._config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, lr: float, step: int, max_steps: int) -> float:
    """The rate of one optimizer step.

    The warm-up rises linearly from lr / warmup_steps to lr, so no step has rate 0. Then constant; or linear or half a cosine (Loshchilov
    and Hutter 2017, arXiv:1608.03983) from lr down to the floor, lr · min_lr_ratio, which the last step has exactly; or wsd (Hu et al.
    2024, arXiv:2404.06395): lr until the last decay_steps, which fall linearly to the floor. Beyond the last step the rate stays.

    Args:
        step: optimizer steps applied before this one, from 0. Skipped steps do not count.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return lr * (step + 1) / warmup
    floor = lr * schedule.min_lr_ratio
    if schedule.name == "constant":
        return lr
    if schedule.name == "wsd":
        decay = schedule.decay_steps
        if decay is None:
            decay = min(max_steps // 5, max_steps - warmup)
        fallen = min(max(step + 1 - (max_steps - decay), 0), decay) / decay if decay else 0.0
        return lr + (floor - lr) * fallen if fallen < 1 else floor
    span = max_steps - warmup - 1
    done = min((step - warmup) / span, 1.0) if span > 0 else 0.0
    if done == 1.0:
        return floor
    left = 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (lr - floor) * left
