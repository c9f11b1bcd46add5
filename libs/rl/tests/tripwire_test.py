"""The tripwire on the failures that were seen when the default task was first tried (shares and norms as measured then), and its memory."""

import json
import math

import pytest

from align.rl import CollapseTripwire, RlError, TripwireConfig


def watch(lines, config=None):
    wire = CollapseTripwire(config or TripwireConfig())
    for step, numbers in enumerate(lines, 1):
        wire.observe(step, numbers)
    return wire


def falling(start, end, steps):
    return [start + (end - start) * i / (steps - 1) for i in range(steps)]


def test_reward_that_halves_within_ten_steps_trips():
    """GRPO at lr 5e-4 from an under-trained model: .53 -> .15 in 10 steps, gradient norm times 5, dead groups .28 -> .91."""
    rewards = [0.5, 0.52, 0.53, 0.53, 0.53, *falling(0.53, 0.15, 10)]
    wire = watch([{"reward": reward, "grad_norm": 0.4} for reward in rewards])
    assert wire.fired and wire.reason.startswith("reward_drop") and wire.at_step <= len(rewards)
    assert [alarm["rule"] for alarm in wire.alarms] == ["reward_drop"]


def test_a_gradient_norm_that_multiplies_trips_and_is_the_one_before_clipping():
    quiet = [{"grad_norm": 0.4 + 0.01 * (i % 5)} for i in range(20)]
    assert not watch(quiet + [{"grad_norm": 6.0}] * 2 + quiet).fired, "a single spike is clipped away"
    wire = watch(quiet + [{"grad_norm": 6.0}] * 3)
    assert wire.fired and wire.at_step == 23 and "before clipping" in wire.reason
    assert watch(quiet + [{"grad_norm": math.inf}] * 3).fired and watch(quiet + [{"grad_norm": math.nan}] * 3).fired
    json.dumps(watch(quiet + [{"grad_norm": math.inf}] * 3).state_dict(), allow_nan=False)


def test_groups_that_die_at_a_low_reward_trip_and_those_that_die_of_success_do_not():
    dying = [{"reward": 0.3, "dead_low": share} for share in [*falling(0.28, 0.97, 8), *[0.97] * 5]]
    assert watch(dying, TripwireConfig(drop=None)).reason.startswith("dead")
    solved = [{"reward": 0.98, "dead_groups": 0.97, "dead_low": 0.0}] * 30
    assert not watch(solved).fired


def test_reward_hacking_is_seen_in_the_verifier_s_accuracy():
    """PPO with KL 0: true accuracy .28 -> .61 -> .11 while the reward model's reward rises .02 -> .83."""
    lines = [
        {"accuracy": accuracy, "prm_reward": proxy}
        for accuracy, proxy in zip([*falling(0.28, 0.61, 10), *falling(0.61, 0.11, 60)], falling(0.02, 0.83, 70), strict=True)
    ]
    wire = watch(lines)
    assert wire.fired and wire.reason.startswith("accuracy_drop") and 20 < wire.at_step < 60


def test_flat_training_is_an_alarm_and_no_stop():
    """GRPO at lr 2e-4 from an under-trained model: sampled reward .34 -> .35 of noise in 130 steps."""
    rewards = [0.34 + 0.03 * math.sin(i * 1.7) for i in range(130)]
    wire = watch([{"reward": reward} for reward in rewards])
    assert not wire.fired and [alarm["rule"] for alarm in wire.alarms] == ["flat"] and wire.alarms[0]["step"] >= 100
    assert not watch([{"reward": reward} for reward in falling(0.34, 0.6, 130)]).alarms


def test_kl_and_success_and_absent_numbers():
    assert watch([{"kl": 0.6}] * 5, TripwireConfig(kl=0.5)).reason.startswith("kl")
    assert not watch([{"kl": 0.6}] * 5).alarms
    good = [{"reward": reward, "grad_norm": 0.4 - 0.003 * i} for i, reward in enumerate(falling(0.54, 0.93, 100))]
    assert not watch(good).alarms
    assert not watch([{"loss": 1.0, "reward": None, "grad_norm": None}] * 200).alarms


def test_latch_alarms_and_memory_survive_a_resume_at_every_step():
    lines = [
        {"reward": r, "grad_norm": n} for r, n in zip([*falling(0.3, 0.6, 12), *falling(0.6, 0.1, 12)], [0.4] * 20 + [9.0] * 4, strict=True)
    ]
    whole = watch(lines)
    assert whole.fired and len(whole.alarms) >= 2
    for k in range(len(lines) + 1):
        first = watch(lines[:k])
        second = CollapseTripwire(TripwireConfig())
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.summary() == first.summary(), "a restored latched tripwire shows its alarms"
        for step, numbers in enumerate(lines[k:], k + 1):
            second.observe(step, numbers)
        assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("field", "value", "lines"),
    [
        ("window", 2, [{"reward": 0.5}] * 2 + [{"reward": 0.1}] * 2),
        ("drop", 0.1, [{"reward": 0.5}] * 5 + [{"reward": 0.4}] * 5),
        ("floor", 0.01, [{"reward": 0.05}] * 5 + [{"reward": 0.0}] * 5),
        ("dead", 0.5, [{"dead_low": 0.6}] * 5),
        ("grad_norm", 2.0, [{"grad_norm": 1.0}] * 6 + [{"grad_norm": 3.0}] * 3),
        ("patience", 1, [{"grad_norm": 1.0}] * 6 + [{"grad_norm": 30.0}]),
        ("kl", 0.1, [{"kl": 0.2}] * 5),
        ("flat", 20, [{"reward": 0.3}] * 20),
        ("flat_margin", 0.5, [{"reward": 0.3}] * 5 + [{"reward": 0.5}] * 95),
    ],
)
def test_every_setting_changes_what_is_seen(field, value, lines):
    assert not watch(lines).alarms and watch(lines, TripwireConfig(**{field: value})).alarms


@pytest.mark.parametrize("field", ["window", "patience", "drop", "dead", "grad_norm", "kl", "flat"])
def test_settings_out_of_range_are_named(field):
    with pytest.raises(RlError, match=f"tripwire.{field}"):
        CollapseTripwire(TripwireConfig(**{field: 0}))
    with pytest.raises(RlError, match=r"^tripwire\.flat is 9; it must be at least twice tripwire\.window, 5, or none$"):
        CollapseTripwire(TripwireConfig(flat=9))
    with pytest.raises(RlError, match="tripwire"):
        CollapseTripwire(TripwireConfig()).load_state_dict({"fired": True})
