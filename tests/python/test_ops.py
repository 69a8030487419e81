"""cohort.ops beside the same formulas in numpy, and their gradients beside differences."""
import cohort
import numpy as np
import pytest
from cohort import ops

RNG = np.random.default_rng(7)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q, k, v, visible, slopes=None, cap=0.0, sinks=None):
    """[T, H, D] of one sequence; visible(i, j)."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    i, j = np.indices((q.shape[0], k.shape[0]))
    out = np.empty_like(q)
    for h in range(heads):
        z = q[:, h] @ k[:, h // group].T / np.sqrt(q.shape[2])
        if cap:
            z = cap * np.tanh(z / cap)
        if slopes is not None:
            z = z - slopes[h] * np.abs(i - j)
        z = np.where(visible(i, j), z, -np.inf)
        if sinks is not None:
            z = np.concatenate([z, np.full((len(z), 1), sinks[h])], 1)
        out[:, h] = softmax(z)[:, :k.shape[0]] @ v[:, h // group]
    return out


def qkv(*lead, heads=4, kv_heads=2, dim=8):
    return tuple(RNG.standard_normal((*lead, n, dim)) for n in (heads, kv_heads, kv_heads))


RULES = {
    "causal": ({}, lambda i, j: j <= i, {}),
    "full": ({"causal": False}, lambda i, j: j < 99, {}),
    "window": ({"window": 3}, lambda i, j: (j <= i) & (j > i - 3), {}),
    "both sides": ({"causal": False, "window": 2, "window_right": 1}, lambda i, j: (j <= i + 1) & (j > i - 2), {}),
    "soft cap": ({"soft_cap": 1.5}, lambda i, j: j <= i, {"cap": 1.5}),
    "slopes": ({"slopes": np.arange(4) / 4}, lambda i, j: j <= i, {"slopes": np.arange(4) / 4}),
    "sinks": ({"sinks": np.arange(4) / 2}, lambda i, j: j <= i, {"sinks": np.arange(4) / 2}),
    "prefix": ({"prefix_lm": np.array([4], np.int32)}, lambda i, j: (j <= i) | (j < 4), {}),
}


@pytest.mark.parametrize("rule", RULES)
def test_attention_rules(rule):
    arguments, visible, changes = RULES[rule]
    q, k, v = qkv(9)
    np.testing.assert_allclose(ops.flash_attention(q, k, v, **arguments).numpy(), attention(q, k, v, visible, **changes),
                               rtol=1e-10, atol=1e-12)


def e4m3(x):
    """The nearest e4m3 number, ties to even, for magnitudes up to 448."""
    step = 2.0 ** (np.maximum(np.frexp(np.abs(x))[1] - 1, -6) - 3)
    return np.rint(x / step) * step


def bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def fp8_attention(q, k, v):
    """Causal, of less than a tile of keys, where q, k and v are rounded."""
    out = np.empty_like(q)
    for h in range(q.shape[1]):
        kv = h // (q.shape[1] // k.shape[1])
        z = np.where(np.tri(len(q), dtype=bool), q[:, h] @ k[:, kv].T / np.sqrt(q.shape[2]), -np.inf)
        p = 256 * np.exp(z - z.max(-1, keepdims=True))
        out[:, h] = e4m3(p) @ v[:, kv] / p.sum(-1, keepdims=True)
    return out


def test_fp8_attention():
    q, k, v = qkv(2, 20)
    scales = 2.0 ** np.array([-7, -6, -5, -4, -6, -5, -7, -3])
    rounded = [e4m3(bf16(x) / s[:, None]) * s[:, None] for x, s in zip((q, k, v), np.split(scales, [4, 6]))]
    got = ops.flash_attention(q, k, v, precision="fp8", scales=scales).numpy()
    for b in range(2):
        np.testing.assert_allclose(got[b], fp8_attention(*(x[b] for x in rounded)), rtol=1e-6, atol=1e-7)
    # Inputs of any strides, and a gradient near that of the rounded inputs.
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    assert np.array_equal(ops.flash_attention(*turned, precision="fp8", scales=scales).numpy(), got)
    gradients = []
    for inputs, arguments in ((q, k, v), {"precision": "fp8", "scales": scales}), (rounded, {}):
        leaves = [leaf(x) for x in inputs]
        ops.sum(ops.square(ops.flash_attention(*leaves, **arguments))).backward()
        gradients.append([x.grad.numpy() for x in leaves])
    for ours, exact in zip(*gradients):
        assert 0 < np.linalg.norm(ours - exact) < 0.1 * np.linalg.norm(exact)
    for bad in {"precision": "fp8"}, {"scales": scales}, {"precision": "fp4", "scales": scales}, \
            {"precision": "fp8", "scales": scales[1:]}:
        with pytest.raises((cohort.InputError, cohort.Error)):
            ops.flash_attention(q, k, v, **bad)


def int8(x):
    """Rounded per row, and what that stands for."""
    step = np.maximum(np.abs(x.astype(np.float32)).max(-1, keepdims=True) / np.float32(127), np.float32(2.0 ** -126))
    return np.rint(x.astype(np.float32) / step).astype(np.float64) * step


@pytest.mark.parametrize("causal", [True, False])
def test_int8_attention(causal):
    q, k, v = qkv(2, 20)
    mean = k.mean((0, 1)) + 5
    shifted = k + 5
    rule = {"precision": "int8", "causal": causal}
    visible = RULES["causal" if causal else "full"][1]
    exact = [attention(q[b], k[b], v[b], visible) for b in range(2)]
    got = ops.flash_attention(q, shifted, v, **rule).numpy()
    centered = ops.flash_attention(q, shifted, v, k_mean=mean, **rule).numpy()
    less = shifted.astype(np.float32) - mean.astype(np.float32)
    for b in range(2):
        np.testing.assert_allclose(got[b], attention(int8(q[b]), int8(shifted[b]), v[b], visible), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(centered[b], attention(int8(q[b]), int8(less[b]), v[b], visible), rtol=1e-10, atol=1e-12)
    assert np.linalg.norm(centered - exact) < 2e-2 * np.linalg.norm(exact)
    assert np.linalg.norm(centered - exact) < 0.5 * np.linalg.norm(got - exact)
    # Inputs of any strides, packed sequences and float32.
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, shifted, v)]
    assert np.array_equal(ops.flash_attention(*turned, k_mean=mean, **rule).numpy(), centered)
    packed = [x.reshape(40, -1, 8).astype(np.float32) for x in (q, shifted, v)]
    narrow = ops.flash_attention(*packed, cu_seqlens=np.array([0, 20, 40], np.int32), **rule)
    assert narrow.dtype == "float32"
    np.testing.assert_allclose(narrow.numpy().reshape(got.shape), got, rtol=1e-4, atol=1e-5)


def test_int8_attention_refuses():
    q, k, v = qkv(9)
    for bad in {"k_mean": k.mean(0)}, {"precision": "int4"}, {"precision": "int8", "k_mean": k[0, 0]}, \
            {"precision": "int8", "scales": np.ones(8)}, {"precision": "int8", "window": 3}, \
            {"precision": "int8", "sinks": np.ones(4)}, {"precision": "int8", "soft_cap": 2.0}:
        with pytest.raises(cohort.InputError):
            ops.flash_attention(q, k, v, **bad)
    for which in range(3):
        leaves = [leaf(x) if i == which else x for i, x in enumerate((q, k, v))]
        with pytest.raises(cohort.InputError, match="no gradients"):
            ops.flash_attention(*leaves, precision="int8")


def test_tiles_hide_the_other_tiles():
    q, k, v = qkv(300)
    tiles = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], np.uint8)
    mask = ops.tile_mask(tiles)
    assert mask.shape == (3, 1) and mask.dtype == "int32"
    expected = attention(q, k, v, lambda i, j: (j <= i) & (tiles[i // 128, j // 128] == 1))
    np.testing.assert_allclose(ops.flash_attention(q, k, v, tiles=mask).numpy(), expected, rtol=1e-10, atol=1e-12)
    for bad in (tiles[:2], tiles[0], tiles[None]):
        with pytest.raises(cohort.Error, match="tile_mask"):
            ops.tile_mask(bad)
        with pytest.raises(cohort.Error, match="tiles"):
            ops.flash_attention(q, k, v, tiles=bad)


def test_samples_follow_the_distribution():
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.tile(np.log(p), (20_000, 1))
    tokens, log_probs = (t.numpy() for t in ops.sample(logits, seed=3))
    # Four standard deviations of a count.
    assert np.all(np.abs(np.bincount(tokens, minlength=4) / 20_000 - p) < 4 * np.sqrt(p * (1 - p) / 20_000))
    np.testing.assert_allclose(log_probs, np.log(p)[tokens], rtol=1e-12)
    assert np.array_equal(tokens, ops.sample(logits, seed=3)[0].numpy())
    assert not np.array_equal(tokens, ops.sample(logits, seed=4)[0].numpy())
    assert set(ops.sample(logits, top_k=2)[0].numpy()) == {0, 1}
    assert set(ops.sample(logits, top_p=0.8)[0].numpy()) == {0, 1, 2}
    assert set(ops.sample(logits, min_p=0.6)[0].numpy()) == {0, 1}
    assert set(ops.sample(logits, temperature=0)[0].numpy()) == {0}
    for bad in ({"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"min_p": 2}):
        with pytest.raises(cohort.Error, match=next(iter(bad))):
            ops.sample(logits, **bad)
    with pytest.raises(cohort.Error):
        ops.sample(logits[0])


def e4m3_numbers():
    """The numbers of the bytes 0 to 126."""
    byte = np.arange(127)
    exponent, mantissa = byte >> 3, byte & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0**(exponent - 10))


@pytest.mark.parametrize("blocks", [False, True])
def test_e4m3_is_the_nearest_number_times_a_power_of_two(blocks):
    x = (RNG.standard_normal((6, 130)) * 2.0**RNG.integers(-6, 6, (6, 130))).astype(np.float32)
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bfloat16 numbers
    values, scales = ops.quantize(x, blocks=blocks)
    assert values.dtype == "e4m3" and values.numpy().dtype == np.uint8 and values.shape == x.shape
    assert scales.shape == ((1, 2) if blocks else (2, 8))
    for columns, of_group in ((slice(0, 128), 0), (slice(128, 130), 1)):
        group = x[:, columns]
        s = scales.numpy()[0, of_group] if blocks else scales.numpy()[of_group, :6, None]
        amax = np.abs(group).max() if blocks else np.abs(group).max(1, keepdims=True)
        assert np.all(s == 2.0**np.ceil(np.log2(amax / 448)))
        nearest = np.abs(np.abs(group / s)[..., None] - e4m3_numbers()).min(-1)
        got = values.to("float64").numpy()[:, columns]
        np.testing.assert_array_equal(np.abs(group / s - got), nearest)
    back = ops.dequantize(values, scales, "float64", blocks=blocks).numpy()
    np.testing.assert_allclose(back, x, rtol=1 / 16, atol=float(np.abs(scales.numpy()).max()) * 2.0**-10)
    assert back.astype(np.float32).view(np.uint32).max() >= 0 and np.all(back.astype(np.float32).view(np.uint32) % 65536 == 0)


def test_quantize_transposes_and_refuses():
    x = RNG.standard_normal((200, 130))
    plain, turned = ops.quantize(x, blocks=True), ops.quantize(x, blocks=True, transpose=True)
    for a, b in zip(plain, turned):
        assert np.array_equal(a.numpy().T, b.numpy())
    rows, scales = ops.quantize(x, transpose=True)
    again, same = ops.quantize(np.ascontiguousarray(x.T))
    assert np.array_equal(rows.numpy(), again.numpy()) and np.array_equal(scales.numpy(), same.numpy())
    with pytest.raises(cohort.Error, match="i8.*with blocks"):
        ops.quantize(x, "int8", blocks=True)
    with pytest.raises(cohort.Error, match="e4m3"):
        ops.quantize(x, "float16")
    with pytest.raises(cohort.Error, match="T, K"):
        ops.quantize(x[0])
    with pytest.raises(cohort.Error, match="scales"):
        ops.dequantize(*plain)
    with pytest.raises(cohort.Error, match="e4m3"):
        ops.exp(plain[0])
    with pytest.raises(cohort.Error, match="e4m3"):
        ops.embedding(x, plain[0][0])


def test_int8_has_a_scale_for_each_row():
    x = RNG.standard_normal((5, 70)).astype(np.float32)
    x[3] = 0
    values, scales = (t.numpy() for t in ops.quantize(x, "int8"))
    expected = np.where(x.any(1), np.abs(x).max(1) / np.float32(127), np.float32(1))
    assert values.dtype == np.int8 and np.array_equal(scales, expected)
    assert np.array_equal(values, np.rint(x / expected[:, None]))
    assert np.array_equal(ops.dequantize(values, scales).numpy(), values * scales[:, None])
    x[1, 2] = np.inf
    assert np.array_equal(np.isnan(ops.quantize(x, "int8")[1].numpy()), [False, True, False, False, False])


def test_attention_forms_agree():
    q, k, v = qkv(3, 5)
    batch = ops.flash_attention(q, k, v).numpy()
    flat = [x.reshape(15, -1, 8) for x in (q, k, v)]
    packed = ops.flash_attention(*flat, cu_seqlens=np.array([0, 5, 10, 15]))
    assert np.array_equal(batch.reshape(15, 4, 8), packed.numpy())
    # Views: columns of [B, T, 3, H, D], a transposed [B, H, T, D], and tokens with a stride.
    wide = np.zeros((3, 5, 3, 4, 8))
    wide[:, :, 0] = q
    heads_first = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    strided = np.repeat(v, 2, 1)[:, ::2]
    assert np.array_equal(batch, ops.flash_attention(wide[:, :, 0], heads_first, strided).numpy())


def test_tables_may_have_numpys_dtypes():
    q, k, v = (x.astype(np.float32) for x in qkv(2, 200))
    slopes, bias, sinks = np.full(4, 0.25), np.linspace(-1, 1, 4 * 9).reshape(4, 9), np.linspace(-1, 1, 4)
    for name, table in (("slopes", slopes), ("bias", bias), ("sinks", sinks)):
        expected = ops.flash_attention(q, k, v, **{name: table.astype(np.float32)})
        np.testing.assert_array_equal(ops.flash_attention(q, k, v, **{name: table}).numpy(), expected.numpy())
    tiles = np.array([[1, 0], [1, 1]])
    as_bool, as_bytes = (ops.flash_attention(q, k, v, tiles=ops.tile_mask(tiles.astype(t))) for t in (bool, np.uint8))
    np.testing.assert_array_equal(as_bool.numpy(), as_bytes.numpy())


def test_masks_of_other_lengths_are_refused():
    q, k, v = qkv(2, 200)
    for n in (1, 3):
        with pytest.raises(cohort.InputError, match=r"sequences of 200 tokens; hint: tile_mask\(\) of visible \[2, 2\]"):
            ops.flash_attention(q, k, v, tiles=ops.tile_mask(np.ones((n, n), np.uint8)))
    for prefix in ([0, 201], [-1, 5]):
        with pytest.raises(cohort.InputError, match="prefix_lm: expected lengths from 0 to 200, got (201|-1)"):
            ops.flash_attention(q, k, v, prefix_lm=np.array(prefix))


def test_attention_refuses_what_does_not_fit():
    q, k, v = qkv(2, 4)
    for bad in [(q[0], k, v), (q, k[:1], v[:1]), (q[..., :4], k, v), (q[0, 0], k, v), (q, k, v[..., :4]),
                (q.astype(np.float32), k, v), (q.reshape(1, 8, 4, 8), k, v)]:
        with pytest.raises(cohort.InputError) as error:
            ops.flash_attention(*bad)
        assert ".cpp" not in str(error.value)
    with pytest.raises(cohort.Error):
        ops.flash_attention(q[0], k[0], v[0], cu_seqlens=np.array([0, 9]))


def test_indices_are_checked():
    table = np.zeros((4, 2))
    for bad in (np.array([2**32]), np.array([-2**31 - 1]), np.array([1.0]), np.array([1], np.float16), np.array([4])):
        with pytest.raises(cohort.Error, match="indices|embedding"):
            ops.embedding(table, bad)
    assert ops.embedding(table, np.array([3, 0])).shape == (2, 2)
    for shape in ([-2, -4], [-1, -1], [3, -1], [2**62, 8], [5, 7]):
        with pytest.raises(cohort.Error, match="reshape"):
            ops.reshape(table, shape)
    assert ops.reshape(table, [2, -1, 2]).shape == (2, 2, 2)


def leaf(array):
    t = cohort.from_dlpack(np.array(array, dtype=np.float64))
    t.requires_grad = True
    return t


def check_gradients(fn, *arrays):
    """The gradients of sum(fn(...) * weights) beside central differences, at up to 20 elements each."""
    leaves = [leaf(x) for x in arrays]
    y = fn(*leaves)
    weights = RNG.standard_normal(y.shape)
    y.backward(weights)
    for n, array in enumerate(arrays):
        grad = leaves[n].grad.numpy()
        for at in RNG.choice(array.size, min(20, array.size), replace=False):
            values = []
            for step in (1e-5, -1e-5):
                moved = [np.array(x) for x in arrays]
                moved[n].flat[at] += step
                values.append((fn(*moved).numpy() * weights).sum())
            assert grad.flat[at] == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5, abs=1e-7), (n, at)


def test_gradients_of_attention():
    check_gradients(ops.flash_attention, *qkv(2, 5))
    bias, sinks = RNG.standard_normal((4, 5)), RNG.standard_normal(4)
    check_gradients(lambda q, k, v, b, s: ops.flash_attention(q, k, v, bias=b, sinks=s, cu_seqlens=np.array([0, 3, 8])),
                    *qkv(8), bias, sinks)
    x = RNG.standard_normal((6, 2, 4))
    check_gradients(lambda x: ops.flash_attention(x, x, x, causal=False), x)


X, W = RNG.standard_normal((5, 6)), RNG.standard_normal((7, 6))
POSITIVE = np.abs(X) + 0.5
TARGETS = np.array([0, 6, 3, 3, 1])


@pytest.mark.parametrize("fn, arrays, expected", [
    (ops.rms_norm, (X, W[0]), lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w),
    (ops.layer_norm, (X, W[0], W[1]),
     lambda x, w, b: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b),
    (ops.linear, (X, W, W[:, 0]), lambda x, w, b: x @ w.T + b),
    (ops.linear, (X, W), lambda x, w: x @ w.T),
    (lambda table: ops.embedding(table, TARGETS), (W,), lambda table: table[TARGETS]),
    (lambda x, w: ops.token_log_probs(x, w, TARGETS, 0.7)[0], (X, W),
     lambda x, w: np.log(softmax(x @ w.T / 0.7))[np.arange(5), TARGETS]),
    (lambda x, w: ops.token_log_probs(x, w, TARGETS)[1], (X, W),
     lambda x, w: -(softmax(x @ w.T) * np.log(softmax(x @ w.T))).sum(-1)),
    (ops.swiglu, (X,), lambda x: x[:, :3] / (1 + np.exp(-x[:, :3])) * x[:, 3:]),
    (ops.silu, (X,), lambda x: x / (1 + np.exp(-x))),
    (ops.log, (POSITIVE,), np.log),
    (ops.sqrt, (POSITIVE,), np.sqrt),
    (ops.tanh, (X,), np.tanh),
    (ops.div, (X, POSITIVE), np.divide),
    (ops.sigmoid_gate, (X, POSITIVE), lambda a, b: a / (1 + np.exp(-b))),
    (ops.sub, (X, POSITIVE), np.subtract),
    (ops.sum, (X,), lambda x: x.sum().reshape(1)),
    (lambda x: ops.scale(x, -2.5), (X,), lambda x: -2.5 * x),
    (lambda x: ops.reshape(x, [3, -1]), (X,), lambda x: x.reshape(3, -1)),
])
def test_values_and_gradients(fn, arrays, expected):
    np.testing.assert_allclose(fn(*arrays).numpy(), expected(*arrays), rtol=1e-10, atol=1e-12)
    check_gradients(fn, *arrays)


def test_attention_does_not_depend_on_threads():
    q, k, v = qkv(2, 300)
    assert np.array_equal(ops.flash_attention(q, k, v).numpy(), ops.flash_attention(q, k, v).numpy())
