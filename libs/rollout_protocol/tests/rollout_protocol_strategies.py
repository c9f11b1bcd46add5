"""Strategies for messages."""

from hypothesis import strategies as st

from align.rollout_protocol import (
    ERROR_CODES,
    Alive,
    Cancel,
    Drawn,
    Error,
    Generate,
    Hello,
    Samples,
    WeightsLoaded,
    WeightsUpdated,
    Welcome,
)

_hex = st.text("0123456789abcdef", min_size=64, max_size=64)
_id = st.text(min_size=1, max_size=20).filter(lambda text: not any("\ud800" <= each <= "\udfff" for each in text))
_word = st.text(max_size=30).filter(lambda text: not any("\ud800" <= each <= "\udfff" for each in text))
_tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)
_count = st.integers(0, 2**63 - 1)


@st.composite
def _drawn(draw):
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
    logprobs = st.lists(st.floats(-1e6, 0), min_size=len(ids), max_size=len(ids))
    return Drawn(ids, draw(logprobs), draw(logprobs), draw(st.sampled_from(["stop", "length"])))


MESSAGES = st.one_of(
    st.builds(Hello, st.integers(0, 9), _hex, _word),
    st.builds(Welcome, st.integers(0, 9), _word, _hex, _count, _word, st.lists(_word, max_size=5)),
    st.builds(
        Generate, _id, _hex, _tokens.filter(bool), st.integers(1, 64), st.integers(1, 4096), st.floats(0, 100), st.floats(0, 1),
        st.integers(0, 1000), st.floats(0, 1), _tokens, st.lists(_word.filter(bool), max_size=4), _count,
    ),
    st.builds(WeightsUpdated, _id, _hex, _count),
    st.builds(WeightsLoaded, _hex, _count),
    st.builds(Cancel, _id),
    st.builds(Samples, _id, _hex, _count, st.lists(_drawn(), min_size=1, max_size=4)),
    st.builds(Alive, st.integers(0, 1000)),
    st.builds(Error, st.none() | _id, st.sampled_from(ERROR_CODES), _word),
)  # fmt: skip
