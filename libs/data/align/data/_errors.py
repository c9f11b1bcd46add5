"""The one exception of this library."""


class DataError(ValueError):
    """A user's data, or what was asked of it, is wrong. One line: the value, its place, and the way out."""

    exit_code = 2
