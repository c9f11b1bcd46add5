class RolloutProtocolError(ValueError):
    """Trainer and sampler cannot work together; the message of one line names what was wrong and the way out."""

    exit_code = 2


class MessageError(RolloutProtocolError):
    """What arrived is no message of the protocol. `field` names the place, such as "generate.prompt[3]"; "" where there is none."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ChannelClosed(RolloutProtocolError):
    """The other end is gone."""


class ChannelTimeout(RolloutProtocolError):
    """The other end said nothing whole, or took nothing, for as long as was allowed."""


class WrongWeights(RolloutProtocolError):
    """The sampler holds other weights than those that are trained."""


class SamplerRefused(RolloutProtocolError):
    """The sampler's own word that it will not do what was asked. `code` is one of `align.rollout_protocol.ERROR_CODES`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
