"""What goes wrong in reinforcement learning through no fault of the code."""


class RlError(ValueError):
    """A reward, a prompt, a cache or a setting that can't be used: the message names the value, the place and the way out."""

    exit_code = 2


class RewardError(RlError):
    """A reward function failed, or gave something that is no finite number."""
