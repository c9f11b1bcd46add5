r"""Math answers, judged exactly: standard library only, pure Python, deterministic, bounded by counted steps.

    >>> from align.verify import grade, equivalent
    >>> grade("72", r"... so she sold \boxed{72} clips").correct
    True
    >>> equivalent(r"\frac{1}{2}", "0.5").reason
    'equal'

`grade` judges a model's whole output, `equivalent` two bare answers, `grade_batch` many; `extract`, `parse` and `normalise` are the
steps by themselves; `explain` and `summary` are for a person.
"""

from align.verify._budget import OverBudget, VerifyError
from align.verify._extract import Extraction, extract
from align.verify._judge import Verdict, equivalent, grade
from align.verify._read import normalise, parse
from align.verify._report import explain, grade_batch, summary
from align.verify._units import Unit
from align.verify._values import Value

__all__ = [
    "Extraction",
    "OverBudget",
    "Unit",
    "Value",
    "Verdict",
    "VerifyError",
    "equivalent",
    "explain",
    "extract",
    "grade",
    "grade_batch",
    "normalise",
    "parse",
    "summary",
]
