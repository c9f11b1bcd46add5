"""What a run leaves behind and what a person sees: run directory, JSON lines, progress, report.html."""

from align.tracking._compare import write_comparison
from align.tracking._environment import environment
from align.tracking._jsonl import RunDirError, read_history
from align.tracking._progress import Progress
from align.tracking._report import write_report
from align.tracking._run import RunDir
from align.tracking._tensorboard import write_tensorboard

__all__ = ["Progress", "RunDir", "RunDirError", "environment", "read_history", "write_comparison", "write_report", "write_tensorboard"]
