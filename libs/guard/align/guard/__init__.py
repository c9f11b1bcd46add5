"""Whether a run fits before it starts: memory projected part by part from plain numbers, and a refusal with a way out."""

from align.guard._host import Host, read_host
from align.guard._preflight import Refused, preflight
from align.guard._project import Projection, project
from align.guard._shape import GuardError, RunShape

__all__ = ["GuardError", "Host", "Projection", "Refused", "RunShape", "preflight", "project", "read_host"]
