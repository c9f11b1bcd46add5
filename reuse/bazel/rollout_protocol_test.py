"""A message goes through a socket and comes out the same; a wrong one is named by its field."""

import socket

from align.rollout_protocol import FROM_TRAINER, Cancel, Channel, MessageError, decode, encode

ours, theirs = (Channel.of_socket(end) for end in socket.socketpair())
ours.send(Cancel("request 7"), timeout_s=1)
assert theirs.receive(FROM_TRAINER, timeout_s=1) == Cancel("request 7")
try:
    decode(encode(Cancel("a")).replace(b'"a"', b"7"))
except MessageError as error:
    assert error.field == "cancel.id"
else:
    raise SystemExit("a number passed for an id")
