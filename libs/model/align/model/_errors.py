"""The one exception of this library."""


class ModelError(ValueError):
    """A model directory, a configuration or an input that cannot be used; the message names the value, the place and the way out."""

    exit_code = 2
