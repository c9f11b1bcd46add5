"""What a user may have to know about."""


class CheckpointError(ValueError):
    """A checkpoint can't be written, read or used here. One line: what, where, and the way out."""

    exit_code = 2


class CheckpointWarning(UserWarning):
    """Something was skipped or left out, and the run goes on."""
