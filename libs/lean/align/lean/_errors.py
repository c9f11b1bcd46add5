"""What a caller did wrong, each with the exit code of a stage. A wrong proof is no error: it is a Verdict."""


class LeanError(ValueError):
    """The caller's mistake: a header that does not import, a name that is none, a pool that is closed."""

    exit_code = 2


class ToolchainNotFound(LeanError):
    """No usable Lean where it was looked for; the message names each place and the set-up command."""


class HeaderError(LeanError):
    """The header does not elaborate in this toolchain."""


class StatementError(LeanError):
    """The trusted statement does not elaborate to a proposition, or is none: nothing is said about the submission."""
