"""Answers are graded."""

from align.verify import equivalent, grade

assert grade("72", r"48/2 = 24, so she sold \boxed{72} clips").correct
assert grade("1/2", r"\boxed{0.5}").correct
assert not grade(r"5\text{ cm}", r"\boxed{5\text{ km}}").correct
assert grade("15", "the total is 15", mode="marked").reason == "no_answer"
assert equivalent(r"\left(\tfrac12, 1\right)", "(0.5, 1)").correct
