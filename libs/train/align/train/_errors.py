"""What a user may have to know about."""


class TrainError(ValueError):
    """A training run that can't start, go on or be resumed as asked. One line: the field, the value, the way out."""

    exit_code = 2


class ResumeWarning(UserWarning):
    """The state was restored exactly, but the continuation may not be bit-equal."""
