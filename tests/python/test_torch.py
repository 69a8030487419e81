"""cohort.torch beside torch's own functions: values, gradients, registration, compilation."""
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import library  # noqa: E402

import cohort.torch as ct  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and __import__("cohort").cuda_device_count() else [])


def reference_attention(q, k, v, causal=True):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def qkv(device="cpu", dtype=torch.float64, shape=(2, 7, 4, 8), kv_heads=2):
    torch.manual_seed(1)
    b, t, h, d = shape
    packed = torch.randn(b, t, h + 2 * kv_heads, d, dtype=dtype, device=device, requires_grad=True)
    return packed, packed.split([h, kv_heads, kv_heads], dim=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradient_equal_those_of_torch(device, causal):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    packed, (q, k, v) = qkv(device, dtype, (2, 33, 4, 64))
    y = ct.flash_attention(q, k, v, causal=causal)
    y.square().sum().backward()
    grad, packed.grad = packed.grad, None
    expected = reference_attention(q, k, v, causal)
    expected.square().sum().backward()
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if device == "cpu" else {"rtol": 3e-2, "atol": 6e-2}
    torch.testing.assert_close(y, expected, **tolerance)
    torch.testing.assert_close(grad, packed.grad, **tolerance)


def test_packed_sequences_do_not_see_each_other():
    _, (q, k, v) = qkv()
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    y = ct.flash_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens=cu)
    assert torch.equal(y.view(q.shape), ct.flash_attention(q, k, v))


def test_rules_are_those_of_ops():
    from cohort import ops

    _, (q, k, v) = qkv(shape=(2, 300, 4, 8))
    q, k, v = (x.detach() for x in (q, k, v))
    tiles = torch.from_dlpack(ops.tile_mask(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.uint8)))
    rules = [{"slopes": torch.rand(4)}, {"bias": torch.rand(4, 7)}, {"sinks": torch.rand(4)}, {"tiles": tiles},
             {"prefix_lm": torch.tensor([3, 200])}, {"soft_cap": 0.5}, {"causal": False, "window": 9, "window_right": 4},
             {"scale": 2.0}]
    results = [ct.flash_attention(q, k, v, **rule) for rule in [{}, *rules]]
    for rule, y in zip(rules, results[1:]):
        doubles = {name: x.double() if name in ("slopes", "bias", "sinks") else x for name, x in rule.items()}
        assert torch.equal(y, torch.from_dlpack(ops.flash_attention(q, k, v, **doubles))), rule
        assert not torch.equal(y, results[0]), rule


def test_gradcheck():
    _, inputs = qkv(shape=(1, 5, 2, 3), kv_heads=1)
    inputs = [x.detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: ct.flash_attention(*x, window=3, soft_cap=2.0), inputs)
    bias, sinks = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 5), (2,)))
    options = {"slopes": torch.tensor([0.5, 0.25]), "prefix_lm": torch.tensor([2])}
    assert torch.autograd.gradcheck(lambda q, k, v, b, s: ct.flash_attention(q, k, v, bias=b, sinks=s, **options),
                                    [*inputs, bias, sinks])
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 6), (6,)))
    assert torch.autograd.gradcheck(ct.rms_norm, (x, w))
    assert torch.autograd.gradcheck(ct.swiglu, (x,))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_have_the_same_gradient(reentrant):
    from torch.utils.checkpoint import checkpoint

    packed, _ = qkv()

    def attend(x):
        return ct.swiglu(ct.rms_norm(ct.flash_attention(*x.split([4, 2, 2], dim=2)), torch.ones(8, dtype=x.dtype)))
    (expected,) = torch.autograd.grad(attend(packed).square().sum(), packed)
    checkpoint(attend, packed, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(packed.grad, expected)


def test_only_some_gradients_are_wanted():
    x, w = torch.randn(3, 6), torch.ones(6, requires_grad=True)
    ct.rms_norm(x, w).sum().backward()
    torch.testing.assert_close(w.grad, (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).sum(0))


def test_opcheck():
    _, (q, k, v) = qkv()
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    library.opcheck(torch.ops.cohort.attention, (q, k, v, None, None, None, None, None, None, True, 0, -1, 0.0, 0.0))
    bias, sinks = (torch.randn(s, dtype=q.dtype, requires_grad=True) for s in ((4, 3), (4,)))
    library.opcheck(torch.ops.cohort.attention, (q, k, v, None, sinks, None, None, None, None, True, 0, -1, 0.0, 0.0))
    library.opcheck(torch.ops.cohort.attention, (q, k, v, bias, sinks, None, None, None, None, True, 0, -1, 0.0, 0.0))
    x, w = (torch.randn(s, requires_grad=True) for s in ((3, 6), (6,)))
    library.opcheck(torch.ops.cohort.rms_norm, (x, w, 1e-5))
    library.opcheck(torch.ops.cohort.swiglu, (x,))


def test_compile_traces_over_the_ops():
    def model(x, w):
        y = ct.rms_norm(x, w)
        return ct.swiglu(torch.cat([y, 2 * y], -1)).sum()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for f in (model, compiled):
        x, w = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_(), torch.ones(6, requires_grad=True)
        f(x, w).backward()
        grads.append((x.grad, w.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_errors_are_those_of_cohort():
    x = torch.randn(3, 6)
    with pytest.raises(__import__("cohort").Error, match="f16"):
        ct.rms_norm(x.half(), x[0].half())
    with pytest.raises(__import__("cohort").Error, match="rms_norm"):
        ct.rms_norm(x, x[0, :5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("device", DEVICES)
def test_round_trips_share_memory(device, dtype):
    import cohort

    x = torch.arange(24, device=device).view(4, 6).to(dtype)[:, ::2]
    t = cohort.from_dlpack(x)
    y = torch.from_dlpack(t)
    assert (t.data_ptr, t.strides, t.shape) == (x.data_ptr(), x.stride(), tuple(x.shape))
    assert y.data_ptr() == x.data_ptr() and torch.equal(x, y)
