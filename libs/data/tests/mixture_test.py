"""Mixtures and prefetch: exact shares, exact resume, nothing made ahead counted as delivered."""

import json
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.data import DataError, Encoded, Example, Loader, Mixture, Prefetch


def encoded_of(lengths, digest):
    examples = [Example(np.full(length, index, np.int32), np.ones(length, np.bool_)) for index, length in enumerate(lengths)]
    return Encoded(examples, len(examples), Counter(), 0, int(sum(lengths)), int(sum(lengths)) - len(lengths), digest)


def loader_of(documents, **options):
    return Loader(documents, **({"global_batch": 4, "micro_batch": 1, "max_length": 40, "packing": False, "seed": 0} | options))


SOURCES = {"a": encoded_of([5, 6, 7], "a"), "b": encoded_of([20] * 9, "b"), "c": encoded_of([2, 40], "c")}
MIXTURE = Mixture(SOURCES, {"a": 1, "b": 2.5, "c": 0.5})


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.lists(st.integers(2, 40), min_size=1, max_size=9), st.floats(0.1, 10)), min_size=1, max_size=4),
    st.sampled_from(["tokens", "documents"]),
    st.integers(1, 200),
)
def test_shares_hold_at_every_point_and_each_source_goes_through_its_epochs(parts, by, count):
    sources = {str(i): encoded_of(lengths, str(i)) for i, (lengths, _) in enumerate(parts)}
    weights = {str(i): weight for i, (_, weight) in enumerate(parts)}
    mixture = Mixture(sources, weights, by=by)
    taken = mixture.cursor(0).take(count)
    firsts = np.cumsum([0, *(len(lengths) for lengths, _ in parts)])
    for which, (start, stop) in enumerate(pairwise(firsts.tolist())):
        own = [index - start for index in taken if start <= index < stop]
        for epoch in range(0, len(own) - (stop - start) + 1, stop - start):
            assert sorted(own[epoch : epoch + stop - start]) == list(range(stop - start))
        units = sum(parts[which][0][index] if by == "tokens" else 1 for index in own)
        # Behind its share by less than one document; ahead of it by one document of its own at most, per unit of weight.
        total = sum(mixture.lengths[taken]) if by == "tokens" else count
        share = total * weights[str(which)] / sum(weights.values())
        largest = 40 if by == "tokens" else 1
        assert units - share <= largest
        assert share - units <= largest * len(parts) * max(1, weights[str(which)] / min(weights.values()))


def test_examples_lengths_and_digest_are_the_sources_joined():
    assert [int(example.ids[0]) for example in MIXTURE.examples] == [0, 1, 2, *range(9), 0, 1]
    assert len(MIXTURE.examples) == 14 and int(MIXTURE.examples[-1].ids[0]) == 1 and len(MIXTURE.examples[2:5]) == 3
    assert MIXTURE.lengths.tolist() == [5, 6, 7, *[20] * 9, 2, 40]
    others = [Mixture(SOURCES, {"a": 1, "b": 2, "c": 0.5}), Mixture(SOURCES, MIXTURE.weights, by="documents")]
    others.append(Mixture(SOURCES | {"c": encoded_of([2, 40], "d")}, MIXTURE.weights))
    assert len({MIXTURE.digest, *(other.digest for other in others)}) == 4
    with pytest.raises(IndexError):
        MIXTURE.examples[14]


@pytest.mark.parametrize("packing", [True, False])
def test_a_mixture_resumes_at_every_step(packing):
    options = {"packing": packing, "window": 8, "max_length": 64}
    loader = loader_of(MIXTURE, **options)
    states, steps = [], []
    for _ in range(20):
        states.append(json.loads(json.dumps(loader.state_dict())))
        steps.append(loader.next_step().documents)
    for at, state in enumerate(states):
        again = loader_of(MIXTURE, **options, world=2, rank=1)
        again.load_state_dict(state)
        assert [again.next_step().documents for _ in steps[at:]] == steps[at:]
    step = loader.next_step()
    assert step.epoch == pytest.approx((sum(map(len, steps)) + len(step.documents)) / 14)
    with pytest.raises(DataError, match=r"the saved mixture has digest .* sources, weights or order changed"):
        loader_of(Mixture(SOURCES, {"a": 1, "b": 2, "c": 0.5}), **options).load_state_dict(states[3])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "the mixture has sources a, b, c but weights for a; name the same"),
        ({"a": 1, "b": 0, "c": 1}, "the weight of b is 0; it must be a positive number"),
        ({"a": 1, "b": float("nan"), "c": 1}, "the weight of b is nan"),
    ],
)
def test_weights_that_make_no_mixture_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        Mixture(SOURCES, weights)
    with pytest.raises(DataError, match="by 'rows' is not known"):
        Mixture(SOURCES, MIXTURE.weights, by="rows")


def test_prefetch_delivers_the_loaders_steps_and_states():
    plain = loader_of(SOURCES["b"])
    with Prefetch(loader_of(SOURCES["b"]), depth=3) as ahead:
        assert ahead.digest == plain.digest
        for _ in range(12):
            assert ahead.state_dict() == plain.state_dict()
            one, two = plain.next_step(), ahead.next_step()
            assert one.documents == two.documents
            time.sleep(0.002)  # let the thread run ahead
        assert ahead.state_dict() == plain.state_dict()


def test_prefetch_resumes_again_and_again_also_when_its_thread_runs():
    plain = loader_of(SOURCES["b"])
    states, steps = [], []
    for _ in range(8):
        states.append(plain.state_dict())
        steps.append(plain.next_step().documents)
    with Prefetch(loader_of(SOURCES["b"])) as ahead:
        for at in (5, 1, 6, 0):
            ahead.next_step()
            ahead.load_state_dict(states[at])
            assert ahead.state_dict() == states[at]
            assert [ahead.next_step().documents for _ in steps[at:]] == steps[at:]
        ahead.load_state_dict(states[2])
        ahead.close()
        assert ahead.next_step().documents == steps[2]  # goes on after a close
    assert not any(thread.name == "data prefetch" for thread in threading.enumerate())


def test_what_goes_wrong_in_the_thread_is_raised_by_next_step():
    class Broken(Loader):
        def next_step(self):
            if len(calls) == 2:
                raise DataError("shard-00001.bin: is damaged")
            calls.append(1)
            return super().next_step()

    calls = []
    documents = SOURCES["b"]
    ahead = Prefetch(Broken(documents, global_batch=1, micro_batch=1, max_length=40, packing=False, seed=0))
    ahead.next_step()
    ahead.next_step()
    with pytest.raises(DataError, match=r"shard-00001.bin: is damaged"):
        ahead.next_step()
    with pytest.raises(DataError, match="depth 0 must be at least 1"):
        Prefetch(loader_of(documents), depth=0)
