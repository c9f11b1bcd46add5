"""Answers get rewards, and a collapse of them trips the wire."""

from align.rl import CollapseTripwire, TripwireConfig, VerifyReward

rows = [{"prompt": "1+1=", "answer": "2"}] * 2
assert [scored.reward for scored in VerifyReward().score(rows, [r"\boxed{2}", r"\boxed{3}"])] == [1.0, 0.0]
wire = CollapseTripwire(TripwireConfig(window=3))
for step in range(1, 41):
    wire.observe(step, {"reward": 0.6 if step < 20 else 0.1})
assert wire.fired and 20 <= wire.at_step < 30, wire.reason
