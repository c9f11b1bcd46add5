"""Evaluation: accuracy judged by the verifier, unbiased pass@k with intervals, item records, and what changed between two results."""

from align.evals._accuracy import EvalResult, Judge, Judgement, accuracy, encode_prompt
from align.evals._choices import choice_accuracy, choice_rows
from align.evals._compare import Comparison, Flip, compare, sign_test
from align.evals._items import EvalError, Item, read_items, write_items
from align.evals._statistics import Estimate, mean_interval, pass_at_k

__all__ = [
    "Comparison",
    "Estimate",
    "EvalError",
    "EvalResult",
    "Flip",
    "Item",
    "Judge",
    "Judgement",
    "accuracy",
    "choice_accuracy",
    "choice_rows",
    "compare",
    "encode_prompt",
    "mean_interval",
    "pass_at_k",
    "read_items",
    "sign_test",
    "write_items",
]
