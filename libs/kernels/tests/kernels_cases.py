"""What every op must hold, as functions of (device, dtype, large): small under the interpreter, large on a GPU at real models' shapes.

Inputs are drawn anew from a seed, outputs are poisoned before the op writes them, and the same op in float64 is the truth: that takes the
torch reference, which `reference_test.py` compares with torch and with numerical gradients.
"""

import contextlib
import functools
import itertools
import warnings
from unittest import mock

import torch

from align import kernels
from align.kernels import _runtime

EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextlib.contextmanager
def poisoned():
    """torch.empty gives NaN, so that what a kernel does not write is seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def rand(*shape, seed, device, dtype, scale=1.0):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def integers(low, high, shape, seed, device, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)


def error(got, want):
    """Largest deviation, over |want| + its root mean square: near the rounding of the dtype for a sound kernel."""
    got, want = got.double(), want.double()
    if not want.numel():
        return 0.0
    worst = ((got - want).abs() / (want.abs() + want.square().mean().sqrt() + 1e-30)).max().item()
    return float("inf") if worst != worst else worst


def run(function, tensors):
    """(outputs, gradients of the floating ones) for upstream gradients drawn from a seed."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [rand(*o.shape, seed=90 + i, device=o.device, dtype=torch.bfloat16).to(o.dtype) for i, o in enumerate(outputs)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [o.detach() for o in outputs], list(torch.autograd.grad(outputs, wanted, upstream))


def agree(name, function, tensors, dtype, factor=2.0, gradient_factor=4.0):
    """The op in `dtype` against itself in float64, outputs and gradients; returns the errors."""
    with poisoned():
        outputs, gradients = run(function, tensors)
    exact_outputs, exact_gradients = run(function, [t.double() if t.is_floating_point() else t for t in tensors])
    errors = {}
    for kind, found, truth, allowed in (("out", outputs, exact_outputs, factor), ("grad", gradients, exact_gradients, gradient_factor)):
        for i, (a, b) in enumerate(zip(found, truth, strict=True)):
            assert a.shape == b.shape and a.is_contiguous(), (name, kind, i)
            errors[f"{kind}{i}"] = error(a, b)
            assert errors[f"{kind}{i}"] <= allowed * EPSILON[dtype], (name, kind, i, errors[f"{kind}{i}"], allowed * EPSILON[dtype])
    return errors


def norm(device, dtype, large):
    errors = {}
    for shape in [(4096, 2048), (4099, 4096), (1, 14336), (257, 576)] if large else [(5, 3, 70), (9, 64)]:
        make = lambda seed, *s: rand(*s, seed=seed, device=device, dtype=dtype)  # noqa: E731
        x, residual, weight = make(1, *shape), make(2, *shape), make(3, shape[-1])
        errors["rms_norm"] = agree("rms_norm", kernels.rms_norm, (x, weight), dtype, gradient_factor=8.0)
        errors["add_rms_norm"] = agree("add_rms_norm", kernels.add_rms_norm, (x, residual, weight), dtype, gradient_factor=8.0)
        only_y = agree("y alone", lambda *a: kernels.add_rms_norm(*a)[0], (x, residual, weight), dtype, gradient_factor=8.0)
        assert set(only_y) == {"out0", "grad0", "grad1", "grad2"}
    return errors


def rope(device, dtype, large):
    tokens, heads, kv_heads, dim, room = ((4, 1025), 32, 8, 128, 4096) if large else ((2, 5), 6, 3, 40, 30)
    q, k = (rand(*tokens, n, dim, seed=n, device=device, dtype=dtype) for n in (heads, kv_heads))
    qkv = rand(*tokens, (heads + 2 * kv_heads) * dim, seed=3, device=device, dtype=dtype)
    angle = rand(room, dim // 2, seed=4, device=device, dtype=torch.float32)
    cos, sin, position_ids = angle.cos(), angle.sin(), integers(0, room, tokens, 5, device)
    tables = lambda x: (t.to(torch.promote_types(x.dtype, torch.float32)) for t in (cos, sin))  # noqa: E731
    errors = {"rope": agree("rope", lambda a, b: kernels.rope(a, b, *tables(a), position_ids), (q, k), dtype, gradient_factor=2.0)}
    cut = lambda x: kernels.rope_qkv(x, *tables(x), position_ids, heads=heads, kv_heads=kv_heads)  # noqa: E731
    errors["rope_qkv"] = agree("rope_qkv", cut, (qkv,), dtype, gradient_factor=2.0)
    parts = qkv.unflatten(-1, (-1, dim)).split_with_sizes((heads, kv_heads, kv_heads), -2)
    for one, other in zip(cut(qkv), (*kernels.rope(parts[0], parts[1], *tables(qkv), position_ids), parts[2]), strict=True):
        assert torch.equal(one, other)  # slices are read where they lie
    rows = q.shape[:-2].numel()
    without = kernels.rope(q, k, cos[:rows], sin[:rows]) if rows <= room else None
    if without:
        order = torch.arange(rows, device=device).view(tokens)
        assert all(torch.equal(a, b) for a, b in zip(without, kernels.rope(q, k, cos, sin, order), strict=True))
    return errors


def swiglu(device, dtype, large):
    errors = {}
    for shape in [(1023, 7168), (511, 14336), (3, 1537)] if large else [(3, 5, 70), (7, 64)]:
        gate, up = (rand(*shape, seed=i, device=device, dtype=dtype, scale=2.0) for i in (1, 2))
        errors["swiglu"] = agree("swiglu", kernels.swiglu, (gate, up), dtype, gradient_factor=8.0)
        errors["swiglu_packed"] = agree("swiglu_packed", kernels.swiglu_packed, (torch.cat((gate, up), -1),), dtype, gradient_factor=8.0)
        assert torch.equal(kernels.swiglu_packed(torch.cat((gate, up), -1)), kernels.swiglu(gate, up))
    return errors


def loss(device, dtype, large):
    """Labels of -100 and NaN in hidden states behind the mask; smoothing and z-loss; chunks that do not divide; both kernels of a row."""
    # Gradients: bf16 logits of size 4 are off by up to 2**-7, so are their exponentials; in fp32 the logits are sums over `size`, whose
    # roundings add up like sqrt(size), and so do those of the gradients' sums.
    shapes = [(11, 16, 300, 4), (9, 8, 70, None)]
    if large:
        shapes = [(4097, 2048, 32768, None)] if dtype != torch.float32 else [(515, 256, 128256, None)]
    errors = {}
    for rows, size, vocabulary, chunk in shapes:
        hidden = rand(rows, size, seed=1, device=device, dtype=dtype)
        weight = rand(vocabulary, size, seed=2, device=device, dtype=dtype, scale=2 * size**-0.5)
        mask = integers(0, 3, (rows,), 3, device) > 0
        if dtype == torch.float32:  # one logit of 100, far above those of the row's first block, by an input that only that row has
            hidden[:, 0], weight[-1] = 0, 0
            hidden[0, 0] = weight[-1, 0] = 10
            mask[0] = True
        targets = torch.where(mask, integers(0, vocabulary, (rows,), 4, device), -100)
        close, several = (8.0, 16.0) if dtype != torch.float32 else (8.0 + size**0.5, 32.0 + 4 * size**0.5)
        for name, options in {"plain": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-3}, "fp32": {"fp32_weight_grad": True}}.items():
            ce = functools.partial(kernels.linear_cross_entropy, targets=targets, mask=mask, chunk=chunk, **options)
            errors[f"cross_entropy {name}"] = agree("cross_entropy", ce, (hidden, weight), dtype, close, several)
        _runtime.trial["cross_entropy_rows"] = {"block": 128 if not large else 2048, "warps": 4}
        errors["cross_entropy in blocks"] = agree("cross_entropy in blocks", ce, (hidden, weight), dtype, close, several)
        _runtime.trial.clear()
        logp = functools.partial(kernels.linear_logprob, targets=targets, mask=mask, chunk=chunk)
        errors["logprob"] = agree("logprob", logp, (hidden, weight), dtype, close, several)
        if dtype == torch.bfloat16:  # strict mode: the sampler's side gives the trainer's bits
            strict = kernels.linear_logprob(hidden, weight, torch.where(mask, targets, 0), invariant=True)
            for some in (slice(0, 1), slice(3, 8)):
                logits = kernels.invariant_linear(hidden[some], weight)
                assert torch.equal(kernels.logprob(logits, torch.where(mask, targets, 0)[some]), strict[some])
        behind = torch.where(mask[:, None], hidden, float("nan")).requires_grad_()
        for op in (logp, ce):
            (gradient,) = torch.autograd.grad(op(behind, weight).sum(), behind)
            assert gradient.isfinite().all() and not gradient[~mask].any()
            assert torch.equal(op(behind, weight), op(hidden, weight))
        assert torch.equal(logp(hidden, weight)[~mask], torch.zeros_like(logp(hidden, weight)[~mask]))
    return errors


def caches(rows, room, kv_heads, dim, page, lengths, device, dtype):
    """(k, v, table): NaN wherever no key of a row lies; page 0 is the table-less cache."""
    k, v = (rand(rows, room, kv_heads, dim, seed=i, device=device, dtype=dtype) for i in (1, 2))
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = float("nan"), float("nan")
    if not page:
        return k, v, None
    pages = room // page
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0)).to(device)
    scattered = []
    for cache in (k, v):
        target = torch.full((rows * pages, page, kv_heads, dim), float("nan"), device=device, dtype=dtype)
        target[order] = cache.view(rows * pages, page, kv_heads, dim)
        scattered.append(target)
    return *scattered, order.view(rows, pages).int()


def decode(device, dtype, large):
    errors, worst = {}, 0.0
    shapes = [(3, 6, 2, 24, 192, (0, 16, 64))]
    if large:
        shapes = [(3, 14, 2, 64, 512, (16,))] if dtype == torch.float32 else [(48, 32, 8, 128, 1024, (0, 64))]
    for rows, heads, kv_heads, dim, room, layouts in shapes:
        lengths = integers(1, room + 1, (rows,), 7, device, torch.int32)
        lengths[0], lengths[-1] = room, 0 if rows > 1 else room - 1
        q = rand(rows, heads, dim, seed=3, device=device, dtype=dtype)
        for page in layouts:
            k, v, table = caches(rows, room, kv_heads, dim, page, lengths, device, dtype)
            for window in (None, 17, room // 2):
                exact = kernels.decode_attention(q.double(), k.double(), v.double(), lengths, table, window=window)
                with poisoned():
                    found = kernels.decode_attention(q, k, v, lengths, table, window=window)
                    strict = kernels.invariant_decode(q, k, v, lengths, table, window=window)
                    counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
                    fused = kernels.decode_attention(q, k, v, lengths, table, window=window, counters=counters)
                    _runtime.trial["decode_attention"] = {"chunk": 64 if not large else 256}
                    pieces = kernels.decode_attention(q, k, v, lengths, table, window=window)
                    fused_pieces = kernels.decode_attention(q, k, v, lengths, table, window=window, counters=counters)
                    _runtime.trial.clear()
                assert torch.equal(found, fused) and torch.equal(pieces, fused_pieces) and not counters.any()
                for a in (found, pieces, strict):
                    # shares are rounded to the dtype of v before the second product; in fp32 a sum over the keys is rounded at each
                    worst = max(worst, error(a, exact))
                    limit = EPSILON[dtype] * (8 if dtype != torch.float32 else 128)
                    assert error(a, exact) <= limit, (rows, page, window, error(a, exact))
    errors["decode_attention"] = {"out0": worst}
    return errors


def decode_step(device, dtype, large):
    """A new token a row: turned, filed and attended over by one kernel, as by the two in float64."""
    errors, (rows, heads, kv_heads, dim, page, pages) = {}, (33, 16, 4, 128, 128, 6) if large else (4, 6, 2, 24, 16, 4)
    lengths = integers(1, page * pages + 1, (rows,), 7, device, torch.int32)
    lengths[0], lengths[1], lengths[-1] = 1, page + 1, page * pages  # the first token; the first of a page; the last of all
    k, v, table = caches(rows, page * pages, kv_heads, dim, page, lengths - 1, device, dtype)
    cos, sin = (rand(page * pages, dim // 2, seed=i, device=device, dtype=torch.float32) for i in (3, 4))
    make = functools.partial(rand, device=device, dtype=dtype, scale=0.5)  # with the bias no larger than the cached ones
    qkv, bias, at = make(rows, (heads + 2 * kv_heads) * dim, seed=5), make((heads + 2 * kv_heads) * dim, seed=6), lengths.long() - 1
    places = table[torch.arange(rows, device=device), at // page].long(), at % page
    parts = torch.stack([qkv.float() * share for share in (0.5, 0.25, 0.25)])
    names = {"plain": (qkv, None, None), "parts": (parts, bias, 17), "window": (qkv, bias, page * pages // 2)}
    for name, (given, added, window) in names.items():
        options = {"heads": heads, "window": window}
        truth = [k.double(), v.double()]
        extra = None if added is None else added.double()
        exact = kernels.rope_decode_attention(given.double(), cos, sin, lengths, *truth, table, bias=extra, **options)
        for chunk, counted in ((0, True), (32, True), (32, False)):
            filed = [k.clone(), v.clone()]
            counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device) if counted else None
            _runtime.trial["rope_decode_attention"] = {"chunk": chunk, "keys": 16 if not large else 64, "programs": 1}
            with poisoned():
                found = kernels.rope_decode_attention(
                    given, cos, sin, lengths, *filed, table, bias=added, counters=counters, early=counted, **options
                )
            _runtime.trial.clear()
            assert found.dtype == dtype and (counters is None or not counters.any())
            errors[name] = {"out0": error(found, exact), "new": max(error(a[places], b[places]) for a, b in zip(filed, truth, strict=True))}
            assert errors[name]["out0"] <= EPSILON[dtype] * (8 if dtype != torch.float32 else 128), (name, chunk, errors)
            assert errors[name]["new"] <= 2 * EPSILON[dtype], (name, errors)
            for a, b in zip(filed, (k, v), strict=True):  # nothing else was written
                a[places] = b[places] = 0
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    return errors


def step(device, dtype, large):
    """The products of a decoding step, with what is inside them, and the rotation into a paged cache."""
    errors = {"step products": {"out0": 0.0}, "rope_to_cache": {"out0": 0.0}}
    several = 4 if dtype != torch.float32 else 64

    def hold(name, found, exact, factor=1):
        for a, b in zip(found, exact, strict=True):
            errors[name]["out0"] = max(errors[name]["out0"], error(a, b))
            assert error(a, b) <= factor * several * EPSILON[dtype], (name, a.shape, error(a, b))

    for size, inner in [(2048, 7168), (4096, 14336), (520, 200)] if large else [(96, 70)]:
        make = lambda *shape, seed, scale=1.0: rand(*shape, seed=seed, device=device, dtype=dtype, scale=scale)  # noqa: E731
        wide_one, down = make(2 * inner, size, seed=1, scale=size**-0.5), make(size, inner, seed=2, scale=inner**-0.5)
        norm, bias = make(size, seed=3), make(size, seed=4)
        for rows in (1, 2, 7, 33, 64) if large else (1, 5):
            h, x = make(rows, size, seed=5), make(rows, inner, seed=6)
            outcomes = []
            for kind in (dtype, torch.float64):
                to = lambda *tensors, kind=kind: (t.to(kind) for t in tensors)  # noqa: E731
                a, b, c, d, e, f = to(h, x, wide_one, down, norm, bias)
                with poisoned():
                    if rows == 1:
                        outcomes.append((kernels.residual_vector(b, d, a, f), kernels.normed_vector(a, e, c, 1e-5, gated=True)))
                        outcomes[-1] += (kernels.normed_vector(a, e, c, 1e-5, f.repeat(2 * inner // size + 1)[: 2 * inner].contiguous()),)
                    else:
                        outcomes.append((*kernels.sum_rms_norm(kernels.split_linear(b, d), a, e, 1e-5, f), kernels.gated_linear(a, c)))
            hold("step products", *outcomes, 2)
    heads, kv_heads, dim, page = (32, 8, 128, 64) if large else (6, 2, 24, 16)
    tokens = 9
    cos, sin = (rand(5 * page, dim // 2, seed=i, device=device, dtype=torch.float32) for i in (7, 8))
    qkv = rand(tokens, (heads + 2 * kv_heads) * dim, seed=9, device=device, dtype=dtype)
    table = torch.randperm(tokens * 5, generator=torch.Generator().manual_seed(1)).view(tokens, 5).int().to(device)
    positions, order = (
        integers(0, 5 * page, (tokens,), 10, device),
        torch.randperm(tokens, generator=torch.Generator().manual_seed(2)).to(device),
    )
    whole = kernels.rope_qkv(qkv, cos, sin, positions, heads=heads, kv_heads=kv_heads)
    parts = torch.stack([qkv.float() * share for share in (0.5, 0.25, 0.25)])
    for given in (qkv, parts):
        caches = [torch.full((tokens * 5, kv_heads, page, dim), float("nan"), device=device, dtype=dtype).transpose(1, 2) for _ in range(2)]
        with poisoned():
            q = kernels.rope_to_cache(given, cos, sin, positions, *caches, table[order.argsort()].contiguous(), order, heads=heads)
        pages = table[torch.arange(tokens, device=device), positions // page].long()
        filed = [cache[pages, positions % page] for cache in caches]
        assert all(torch.equal(a, b) for a, b in zip((q, *filed), whole, strict=True))  # the bits of rope_qkv: the parts add up exactly
        assert all(int((~cache.isnan()).sum()) == tokens * kv_heads * dim for cache in caches)  # nothing else was written
    return errors


def gemv(device, dtype, large):
    worst = 0.0
    for outputs, size in [(4096, 14336), (6144, 4096), (131, 77)] if large else [(70, 300), (64, 256)]:
        weight = rand(outputs, size, seed=1, device=device, dtype=dtype)
        for batch in (1, 2, 7, 16):
            x, addend = (rand(batch, n, seed=n, device=device, dtype=dtype) for n in (size, outputs))
            for extra in (None, addend):
                exact = kernels.gemv(x.double(), weight.double(), None if extra is None else extra.double())
                with poisoned():
                    found = kernels.gemv(x, weight, extra)
                worst = max(worst, error(found, exact))
                # in fp32 the sum over `size` is rounded more often than once
                limit = 2 * EPSILON[dtype] * (1 if dtype != torch.float32 else size**0.5)
                assert error(found, exact) <= limit, (batch, outputs, size, error(found, exact))
    return {"gemv": {"out0": worst}}


def sampling(device, dtype, large):
    """Tokens and log-probabilities are the reference's (float64 but for the thresholds), filter by filter."""
    from align.kernels import _sampling

    rows, vocabulary = (512, 32768) if large else (12, 777)
    logits = rand(rows, vocabulary, seed=1, device=device, dtype=torch.float32, scale=3.0).to(dtype)
    keys, positions = integers(-(2**62), 2**62, (rows,), 2, device), integers(0, 5000, (rows,), 3, device)
    pick = lambda values, seed, kind: torch.tensor(values, device=device, dtype=kind)[integers(0, len(values), (rows,), seed, device)]  # noqa: E731
    options = (
        pick([0.0, 0.5, 1.0, 1.0, 1.5], 4, torch.float32),
        pick([0, 0, 1, 5, 50, 2 * vocabulary], 5, torch.int32),
        pick([1.0, 1.0, 0.9, 0.3, 1e-6], 6, torch.float32),
        pick([0.0, 0.0, 0.05, 1.0], 7, torch.float32),
    )
    options[0][0], logits[0] = 0.0, 0.0  # the most likely token where exp makes equals of it and others
    logits[0, 5], logits[0, 9] = 1e-9, 2e-9
    logits[1::5, vocabulary // 3 :] = float("-inf")  # whole parts of a row that no token can be drawn from
    counters, found = torch.zeros(rows, dtype=torch.int32, device=device), {}
    wanted = _sampling.reference(logits, keys, positions, *options)
    unfiltered = options[0], torch.zeros_like(options[1]), torch.ones_like(options[2]), torch.zeros_like(options[3])
    wanted_unfiltered = _sampling.reference(logits, keys, positions, *unfiltered)
    small = {} if large else {"sample": {"block": 256, "warps": 2, "share": vocabulary // 4 + 1}, "sample_row": {"block": 256, "warps": 2}}
    cases = {"a row in registers": (32768, None), "a row in the cache": (0, None), "in parts": (32768, counters)}
    for name, (whole, counted) in cases.items():
        given, truth = (options, wanted) if counted is None else (unfiltered, wanted_unfiltered)
        with poisoned(), mock.patch.dict(_runtime.trial, small), mock.patch.object(_sampling, "WHOLE", whole):
            drawn = kernels.sample(logits, keys, positions, *given, counters=counted)
            some = [x[3:8] for x in (logits, keys, positions, *given)]
            again = kernels.sample(*some, counters=counted)
        tokens, own, plain = drawn
        assert tokens[0] == 9 and not counters.any()
        assert all(torch.equal(a, b[3:8]) for a, b in zip(again, drawn, strict=True))  # in any batch
        same = tokens == truth[0]
        assert same.sum() >= rows - rows // 256, name  # at a cut, or in a photo finish, fp32 may decide otherwise
        assert (plain - truth[2])[same].abs().max() < 1e-4, name
        # one token more or less in a kept set of thousands moves its mass a little
        assert ((own - truth[1])[same].abs() < 1e-4).sum() >= same.sum() - rows // 128, name
        found[f"sample, {name}"] = {"tokens that differ": (~same).sum().item(), "logprob": (plain - truth[2])[same].abs().max().item()}
    return found


def strict_linear(device, dtype, large):
    """Right, and the same bits for a row in any batch."""
    worst = 0.0
    for outputs, size in [(2048, 7168), (100, 200)] if large else [(50, 200), (64, 128)]:
        weight, bias = (
            rand(outputs, size, seed=1, device=device, dtype=dtype, scale=size**-0.5),
            rand(outputs, seed=2, device=device, dtype=dtype),
        )
        x = rand(1025 if large else 70, size, seed=3, device=device, dtype=dtype)
        with poisoned():
            found = kernels.invariant_linear(x, weight, bias)
        worst = max(worst, error(found, kernels.invariant_linear(x.double(), weight.double(), bias.double())))
        assert worst <= (2 if dtype != torch.float32 else 64) * EPSILON[dtype]
        for start, count in ((0, 1), (5, 3), (17, 33)):
            assert torch.equal(kernels.invariant_linear(x[start : start + count], weight, bias), found[start : start + count])
    x, weight = x[:9].detach().requires_grad_(), weight.detach().requires_grad_()
    grads = torch.autograd.grad(kernels.invariant_linear(x, weight).sum(), (x, weight))
    assert error(grads[0], weight.double().sum(0).expand(9, -1)) <= 8 * EPSILON[dtype] * (1 if dtype != torch.float32 else 8)
    return {"invariant_linear": {"out0": worst}}


def strict_attention(device, dtype, large):
    """Right, forward and backward, and in half precision the same bits alone against a cache, for every query looked at."""
    heads, kv_heads, dim, ends = (6, 2, 24, [0, 70, 70, 99])
    if large:
        heads, kv_heads, dim, ends = (
            (14, 2, 64, [0, 300, 300, 301, 700]) if dtype == torch.float32 else (32, 8, 128, [0, 1000, 1000, 1001, 3000])
        )
    cu_seqlens, longest = torch.tensor(ends, dtype=torch.int32, device=device), max(b - a for a, b in itertools.pairwise(ends))
    q, k, v = (rand(ends[-1], n, dim, seed=i, device=device, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))
    errors, several = {}, 32.0 if dtype != torch.float32 else 512.0
    for window in (None, 20 if not large else 200):
        op = lambda q, k, v, w=window: kernels.invariant_attention(q, k, v, cu_seqlens, longest, window=w)  # noqa: E731
        errors[f"invariant_attention, window {window}"] = agree("invariant_attention", op, (q, k, v), dtype, several / 4, several)
        packed = op(q, k, v)
        if dtype == torch.float32:
            continue
        for a, b in itertools.pairwise(ends):
            for position in sorted({0, (b - a) // 3, (b - a) // 2, b - a - 1}) if b > a else ():
                lengths = torch.tensor([position + 1], dtype=torch.int32, device=device)
                alone = kernels.invariant_decode(q[a + position][None], k[None, a:b], v[None, a:b], lengths, window=window)
                assert torch.equal(alone[0], packed[a + position]), (a, position, window)
    return errors


CASES = {f.__name__: f for f in (norm, rope, swiglu, loss, decode, decode_step, step, gemv, sampling, strict_linear, strict_attention)}
