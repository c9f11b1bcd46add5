"""What can go wrong, by name."""


class TokenizerError(ValueError):
    """A tokenizer file, a text or an option that cannot be used; one line that names the place and the way out."""

    exit_code = 2


class ChatError(ValueError):
    """A chat template or a conversation that cannot be rendered; names the template line or the message."""

    exit_code = 2


class PrefixWarning(UserWarning):
    """A later turn's prompt does not begin with the ids of the earlier one."""


class VendoredWarning(UserWarning):
    """A model directory has no whole tokenizer of its own, and the vendored copy stands in."""
