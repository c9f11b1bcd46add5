"""Cursor, batches, loader: every token once an epoch, no target across a boundary, exact resume on any number of ranks."""

import contextlib
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data import Cursor, DataError, Encoded, Example, Loader, Prefetch, eval_batches

PAD = 999_999


def encoded_of(lengths, digest="d"):
    """Document i holds the ids 1000 i + 0, 1, 2, ...; its last two thirds are trained, so no two tokens are alike."""
    examples = []
    for index, length in enumerate(lengths):
        mask = np.arange(length) >= length // 3
        examples.append(Example(np.arange(1000 * index, 1000 * index + length, dtype=np.int32), mask))
    trained = int(sum(example.mask[1:].sum() for example in examples))
    return Encoded(examples, len(examples), Counter(), 0, int(sum(lengths)), trained, digest)


def loader_of(encoded, **options):
    given_options = {"global_batch": 4, "micro_batch": 1, "max_length": 40, "packing": True, "seed": 0, "pad_id": PAD} | options
    return Loader(encoded, **given_options)


def check_batch(batch, encoded):
    """Everything that a batch claims, against the documents; returns what it holds: a Counter of ids."""
    assert {a.dtype for a in (batch.input_ids, batch.targets, batch.position_ids)} == {np.dtype(np.int64)}
    assert batch.loss_mask.dtype == np.bool_
    assert batch.input_ids.shape == batch.targets.shape == batch.loss_mask.shape == batch.position_ids.shape
    ids, targets, mask, positions = (a.ravel() for a in (batch.input_ids, batch.targets, batch.loss_mask, batch.position_ids))
    rows, width = batch.input_ids.shape
    bounds = batch.cu_seqlens.tolist() if batch.cu_seqlens is not None else list(range(0, rows * width + 1, width))
    assert bounds[0] == 0 and bounds[-1] == rows * width and bounds == sorted(bounds)
    held = Counter()
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        assert start // width == (stop - 1) // width  # inside one row
        assert positions[start:stop].tolist() == list(range(stop - start))
        assert batch.max_seqlen is None or stop - start <= batch.max_seqlen
        real = ids[start:stop] != PAD
        if not real.any():
            assert not mask[start:stop].any() and not targets[start:stop].any()
            continue
        document = encoded.examples[ids[start] // 1000]
        size = len(document.ids)
        if batch.cu_seqlens is not None:
            assert stop - start == size
        assert ids[start : start + size].tolist() == document.ids.tolist() and not real[size:].any()
        assert targets[start : start + size - 1].tolist() == document.ids[1:].tolist()
        assert mask[start : start + size - 1].tolist() == document.mask[1:].tolist()
        assert not mask[start + size - 1 : stop].any() and not targets[start + size - 1 : stop].any()
        held.update(document.ids.tolist())
    return held


LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=40)


SHAPES = st.sampled_from([(4, 1, 1), (4, 2, 1), (4, 1, 4), (8, 2, 2), (3, 3, 1)])  # global_batch, micro_batch, world


@given(LENGTHS, st.booleans(), SHAPES, st.integers(0, 3), st.integers(1, 50))
def test_every_token_once_an_epoch_on_all_ranks_together(lengths, packing, shape, seed, window):
    encoded = encoded_of(lengths)
    global_batch, micro_batch, world = shape
    options = {"global_batch": global_batch, "micro_batch": micro_batch, "packing": packing, "seed": seed, "window": window}
    loaders = [loader_of(encoded, **options, rank=rank, world=world) for rank in range(world)]
    seen, documents, shapes = Counter(), [], set()
    while True:
        steps = [loader.next_step() for loader in loaders]
        held, trained = Counter(), 0
        for step in steps:
            assert (step.documents, step.trained_tokens, step.tokens, step.epoch) == (
                steps[0].documents,
                steps[0].trained_tokens,
                steps[0].tokens,
                steps[0].epoch,
            )
            assert len(step.micro_batches) == global_batch // world // micro_batch
            for batch in step.micro_batches:
                assert len(batch.input_ids) == micro_batch
                held += check_batch(batch, encoded)
                trained += batch.loss_mask.sum()
                shapes.add((batch.input_ids.shape, None if batch.cu_seqlens is None else batch.cu_seqlens.shape, batch.max_seqlen))
        assert trained == steps[0].trained_tokens and held.total() == steps[0].tokens
        assert held == sum((Counter(encoded.examples[i].ids.tolist()) for i in steps[0].documents), Counter())
        seen += held
        documents += steps[0].documents
        assert steps[0].epoch == pytest.approx(len(documents) / len(lengths))
        if len(documents) >= 2 * len(lengths):
            break
    for epoch in range(2):
        assert sorted(documents[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))
    if packing:
        assert len(shapes) == 1 and {shape[0][1] for shape in shapes} == {40}


@given(LENGTHS, st.booleans(), st.integers(1, 5), st.integers(1, 4))
def test_an_evaluation_sees_everything_once_and_ranks_have_equally_many_batches(lengths, packing, micro_batch, world):
    encoded = encoded_of(lengths)
    options = {"micro_batch": micro_batch, "max_length": 40, "packing": packing, "pad_id": PAD}
    ranks = [list(eval_batches(encoded, **options, rank=rank, world=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    # Every document here has a target, so a batch without any is one that only fills up.
    full = [batch for batches in ranks for batch in batches if batch.loss_mask.any()]
    assert sum(batch.loss_mask.sum() for batch in full) == encoded.trained_tokens
    held = sum((check_batch(batch, encoded) for batch in full), Counter())
    assert held == sum((Counter(example.ids.tolist()) for example in encoded.examples), Counter())


def order(loader, steps):
    return [loader.next_step().documents for _ in range(steps)]


@pytest.mark.parametrize("packing", [True, False])
def test_resume_at_every_step_on_any_number_of_ranks(packing):
    """Two epochs and more; each state goes through JSON, is resumed on 1, 2 and 4 ranks with another micro_batch, and then a third time."""
    lengths = [2 + (7 * i) % 39 for i in range(50)]
    encoded = encoded_of(lengths)
    whole = loader_of(encoded, packing=packing, window=16)
    total = 2 * len(lengths) // 4 + 3
    states, steps = [whole.state_dict()], []
    for _ in range(total):
        steps.append(whole.next_step().documents)
        states.append(whole.state_dict())
    for at, state in enumerate(states[:-1]):
        for world, micro_batch in ((1, 4), (2, 1), (4, 1)):
            ranks = [loader_of(encoded, packing=packing, window=16, rank=r, world=world, micro_batch=micro_batch) for r in range(world)]
            for loader in ranks:
                loader.load_state_dict(json.loads(json.dumps(state)))
            once = [loader.next_step() for loader in ranks]
            assert all(step.documents == steps[at] for step in once)
            held = sum((check_batch(batch, encoded) for step in once for batch in step.micro_batches), Counter())
            assert held == sum((Counter(encoded.examples[i].ids.tolist()) for i in steps[at]), Counter())
            assert ranks[-1].state_dict() == states[at + 1]
        again = loader_of(encoded, packing=packing, window=16)
        again.load_state_dict(ranks[-1].state_dict())
        assert order(again, min(9, total - at - 1)) == steps[at + 1 : at + 10]


@pytest.mark.parametrize("packing", [True, False])
def test_the_rest_of_an_epoch_is_the_same_from_every_step_with_other_ranks_and_workers(packing):
    """Ranks and prefetch depths (0: no thread) change at the resume, and the state is one that yet another shape of run has saved."""
    encoded = encoded_of([2 + (7 * i) % 39 for i in range(64)])
    options = {"packing": packing, "window": 24}
    whole, count = loader_of(encoded, **options), 1
    while whole.next_step().epoch < 1:
        count += 1
    saver = [loader_of(encoded, **options, rank=rank, world=2, micro_batch=2) for rank in range(2)]
    plain = loader_of(encoded, **options)
    expected = [Counter(plain_ids(plain.next_step().documents, encoded)) for _ in range(count)]
    for at in range(count):
        state = json.loads(json.dumps(saver[1].state_dict()))
        for world, depth in ((1, 0), (1, 3), (2, 1), (4, 2)):
            with contextlib.ExitStack() as stack:
                ranks = []
                for rank in range(world):
                    loader = loader_of(encoded, **options, rank=rank, world=world)
                    ranks.append(stack.enter_context(Prefetch(loader, depth=depth)) if depth else loader)
                    ranks[-1].load_state_dict(state)
                for step in range(at, count):
                    batches = [batch for rank in ranks for batch in rank.next_step().micro_batches]
                    assert sum((check_batch(batch, encoded) for batch in batches), Counter()) == expected[step]
        for loader in saver:
            loader.next_step()


def plain_ids(documents, encoded):
    return [token for index in documents for token in encoded.examples[index].ids.tolist()]


def test_the_order_depends_on_seed_epoch_and_digest_only():
    lengths = [10] * 64
    first = order(loader_of(encoded_of(lengths)), 32)
    assert order(loader_of(encoded_of(lengths), world=2, rank=1, micro_batch=2), 32) == first
    assert order(loader_of(encoded_of(lengths), seed=1), 32) != first
    assert order(loader_of(encoded_of(lengths, digest="e")), 32) != first
    assert first[:4] != first[4:8]


def test_packed_rows_are_shuffled():
    """Best fit makes the fullest rows of the longest documents first; the steps must not go from long to short."""
    lengths = [2 + i % 38 for i in range(1000)]
    sizes = [np.mean([lengths[i] for i in documents]) for documents in order(loader_of(encoded_of(lengths), global_batch=16), 24)]
    half = len(sizes) // 2
    assert abs(np.mean(sizes[:half]) - np.mean(sizes[half:])) < 3


def test_a_saved_run_of_other_data_or_settings_is_refused_by_name():
    lengths = [10] * 12
    state = loader_of(encoded_of(lengths)).state_dict()
    for message, encoded, options in (
        ("the saved cursor has digest 'd', this run 'e': the data changed", encoded_of(lengths, "e"), {}),
        ("the saved cursor has size 12, this run 11: the rows changed", encoded_of(lengths[1:]), {}),
        ("the saved cursor has seed 0, this run 1: the order changed", encoded_of(lengths), {"seed": 1}),
        ("the saved run has packing True, this one False", encoded_of(lengths), {"packing": False}),
        ("the saved run has max_length 40, this one 41", encoded_of(lengths), {"max_length": 41}),
        ("the saved run has window 4096, this one 8", encoded_of(lengths), {"window": 8}),
        ("the saved run has global_batch 4, this one 2", encoded_of(lengths), {"global_batch": 2}),
    ):
        with pytest.raises(DataError, match=message):
            loader_of(encoded, **options).load_state_dict(state)


def test_another_global_batch_when_allowed_loses_nothing():
    encoded = encoded_of([10] * 24)
    one, two = loader_of(encoded, packing=False), loader_of(encoded, packing=False, global_batch=6)
    done = order(one, 3)
    two.load_state_dict(one.state_dict(), allow_change=("global_batch",))
    assert sorted(i for documents in done + order(two, 2) for i in documents) == list(range(24))


@pytest.mark.parametrize("change", [{"row": 99}, {"row": -1}, {"row": None}, {"cursor": None}, {"row": True}])
def test_a_state_that_fits_no_run_is_refused_and_leaves_the_loader_as_it_was(change):
    loader = loader_of(encoded_of([10] * 12))
    loader.next_step()
    before = loader.state_dict()
    with pytest.raises(DataError, match="the saved"):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before


def test_shapes_that_do_not_divide_are_refused_with_a_way_out():
    encoded = encoded_of([10] * 12)
    for options, message in (
        ({"global_batch": 96, "world": 4, "micro_batch": 10}, "96 is not a multiple of ranks 4 × micro_batch 10; try micro_batch 8 or 12"),
        ({"global_batch": 10, "world": 4}, "global_batch 10 is not a multiple of ranks 4; try global_batch 8 or 12"),
        ({"global_batch": 2, "world": 4}, "global_batch 2 is not a multiple of ranks 4; try global_batch 4"),
        ({"global_batch": 4, "micro_batch": 9}, "try micro_batch 4"),
        ({"rank": 2, "world": 2}, "rank 2 one of 0 to 1"),
        ({"micro_batch": 0}, "must be at least 1"),
        ({"max_length": 9}, "document 0 has 10 tokens, more than max_length 9; encode the rows with that max_length"),
    ):
        with pytest.raises(DataError, match=message):
            loader_of(encoded, **options)


@given(st.integers(1, 40), st.lists(st.integers(0, 50), max_size=8), st.integers(0, 5))
def test_cursor_takes_everything_once_an_epoch(size, takes, seed):
    cursor, whole = Cursor(size, seed=seed, digest="d"), Cursor(size, seed=seed, digest="d")
    taken = []
    for k in takes:
        resumed = Cursor(size, seed=seed, digest="d")
        resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
        part = cursor.take(k)
        assert resumed.take(k) == part and resumed.state_dict() == cursor.state_dict()
        taken += part
    assert whole.take(sum(takes)) == taken
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))
    assert cursor.progress == pytest.approx(len(taken) / size)
    assert cursor.remaining == size - len(taken) % size


def test_cursor_order_is_pinned():
    """A change of these numbers would make every saved run unresumable."""
    assert Cursor(8, seed=0, digest="d").take(16) == [2, 4, 1, 7, 3, 5, 0, 6, 7, 3, 6, 2, 0, 5, 4, 1]


def test_cursor_permutations_are_uniform_enough():
    """Of 4! orders each within 5 sigma of its share over 2,400 epochs (sigma of a count is about 9.8)."""
    cursor = Cursor(4, seed=0, digest="d")
    counts = Counter(tuple(cursor.take(4)) for _ in range(2400))
    assert len(counts) == 24 and all(51 < count < 149 for count in counts.values())


def test_cursor_refuses_what_makes_no_sense():
    with pytest.raises(DataError, match="size 0: there is nothing to draw from"):
        Cursor(0, seed=0, digest="d")
    cursor = Cursor(3, seed=0, digest="d")
    with pytest.raises(DataError, match="cannot take -1 indices"):
        cursor.take(-1)
    with pytest.raises(DataError, match="epoch 0 and position 4 fit no run over 3 rows"):
        cursor.load_state_dict(cursor.state_dict() | {"position": 4})
