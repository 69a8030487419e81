"""The package on a GPU: memory shared with torch and CuPy, the order of streams, bf16 attention, compilation. Skipped without a
GPU, unless COHORT_REQUIRE in the environment contains "gpu"."""
import os

import cohort
import numpy as np
import pytest
from cohort import ops

REQUIRED = "gpu" in os.environ.get("COHORT_REQUIRE", "")
if not REQUIRED and cohort.cuda_device_count() == 0:
    pytest.skip("no GPU, or a build without CUDA", allow_module_level=True)
torch = __import__("torch") if REQUIRED else pytest.importorskip("torch", reason="torch is not installed")

from torch import library  # noqa: E402

import cohort.torch as ct  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8"])
def test_cupy_shares_memory(dtype):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    x = cupy.arange(24, dtype=dtype).reshape(4, 6)[1:, ::2]
    t = cohort.from_dlpack(x)
    y = cupy.from_dlpack(t)
    assert (t.device, t.dtype, t.strides) == ("cuda:0", dtype, (6, 2))
    assert t.data_ptr == x.data.ptr == y.data.ptr
    assert np.array_equal(t.numpy(), cupy.asnumpy(x))


def test_cupy_streams_are_ordered():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    x = cupy.zeros(1 << 24, cupy.float32)
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(200):
            x += 1
        y = cupy.from_dlpack(ops.scale(cohort.from_dlpack(x), 2))
        assert float(y.min()) == 400


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_torch_shares_memory(dtype):
    x = normal(4, 6, dtype=torch.float32).mul(9).to(dtype)[:, ::2]
    t = cohort.from_dlpack(x)
    y = torch.from_dlpack(t)
    assert t.data_ptr == x.data_ptr() == y.data_ptr() and t.strides == y.stride() == x.stride()
    assert torch.equal(x, y)


def test_float16_is_shared_and_converted_but_refused_by_ops():
    x = normal(3, 8, dtype=torch.float32).mul(1000)
    half = x.half()
    t = cohort.from_dlpack(half)
    assert t.data_ptr == half.data_ptr() == torch.from_dlpack(t).data_ptr() and t.dtype == "float16"
    assert torch.equal(torch.from_dlpack(cohort.from_dlpack(x).to("float16")), half)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(torch.from_dlpack(t.to(str(dtype)[6:])), half.to(dtype))
    for call in (ct.swiglu, ops.silu):
        with pytest.raises(cohort.Error, match="f16"):
            call(half)


def slowly_filled(value, shape):
    """A tensor whose values are written on the current stream, some milliseconds from now."""
    x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    torch.cuda._sleep(20_000_000)
    return x.fill_(value)


@pytest.mark.parametrize("through", ["ops", "torch"])
def test_work_on_a_side_stream_is_seen_in_order(through):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = slowly_filled(3, (1 << 20,))
        y = torch.from_dlpack(ops.square(cohort.from_dlpack(x))) if through == "ops" else ct.swiglu(x.view(-1, 2))
        x.zero_()  # after it was read
        y = y.float()
    side.synchronize()
    expected = 9 if through == "ops" else 9 / (1 + np.exp(-3))
    assert abs(y.min().item() - expected) < 0.05 and y.min() == y.max()


def test_memory_of_results_is_not_reused_too_early():
    for i in range(50):
        y = torch.from_dlpack(ops.scale(cohort.from_dlpack(slowly_filled(i, (4096,))), 1))
        z = y + 0
        del y
        other = cohort.from_dlpack(torch.full((4096,), -1, device="cuda", dtype=torch.bfloat16))
        overwriting = [ops.scale(other, 1) for _ in range(4)]
        assert z.min().item() == i, overwriting


def qkv(batch, length, heads, kv_heads, dim):
    return [normal(batch, length, n, dim).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def reference(q, k, v, scores=lambda s: s, sinks=None):
    """Causal attention in f32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = scores(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
    s = s.masked_fill(torch.ones(s.shape[-2:], device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., :k.shape[2]] @ v).transpose(1, 2)


def with_gradients(attention, inputs, dout):
    out = attention(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


@pytest.mark.parametrize("dim", [64, 128])
def test_errors_of_bf16_are_those_of_sdpa(dim):
    inputs, dout = qkv(2, 700, 8, 2, dim), normal(2, 700, 8, dim)

    def sdpa(q, k, v):
        return SDPA(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)

    exact = with_gradients(reference, inputs, dout)
    ours, theirs = (with_gradients(f, inputs, dout) for f in (ct.flash_attention, sdpa))
    for name, a, b, c in zip("o dq dk dv".split(), ours, theirs, exact):
        errors = [(x.float() - c.float()).norm().item() for x in (a, b)]
        assert errors[0] <= 2 * errors[1], (name, errors)


def test_gradients_of_bias_and_sinks():
    inputs, dout = qkv(2, 300, 4, 4, 64), normal(2, 300, 4, 64)
    bias, sinks = (normal(*shape, dtype=torch.float32).requires_grad_() for shape in ((4, 33), (4,)))
    at = torch.arange(300, device="cuda")
    distance = (at[None] - at[:, None]).clamp(-16, 16) + 16
    ours = with_gradients(lambda q, k, v, b, s: ct.flash_attention(q, k, v, bias=b, sinks=s), [*inputs, bias, sinks], dout)
    exact = with_gradients(lambda q, k, v, b, s: reference(q, k, v, lambda z: z + b[:, distance], s), [*inputs, bias, sinks], dout)
    for a, b in zip(ours, exact):
        # A bf16 rounding is at most 2^-9 of a value; results have a few of them.
        assert (a.float() - b.float()).norm() <= 2**-6 * b.float().norm()


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_in_eight_bits(precision, dim):
    q, k, v = (x.detach() for x in qkv(2, 700, 8, 2, dim))
    k += 3
    keys = k.float() - (3 if precision == "int8" else 0)  # scores without the mean have the same softmax
    arguments = {"fp8": {"scales": np.full(12, 2.0**-6)}, "int8": {"k_mean": k.float().mean((0, 1)).cpu()}}[precision]
    call = lambda: ops.flash_attention(*map(cohort.from_dlpack, (q, k, v)), precision=precision, **arguments)  # noqa: E731
    if precision == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        with pytest.raises((cohort.Error, cohort.InputError), match="9.0"):
            call()
        return
    exact, out = reference(q, keys, v), torch.from_dlpack(call()).float()
    rounded = torch.from_dlpack(ops.flash_attention(*map(cohort.from_dlpack, (q, k, v)))).float()
    errors = [(x - exact).norm() / exact.norm() for x in (rounded, out)]
    assert errors[0] < errors[1] < {"fp8": 0.1, "int8": 0.03}[precision], errors


def test_ops_differentiate_on_the_gpu():
    arrays = [normal(1, 130, 4, 64) for _ in range(3)]
    leaves = [cohort.from_dlpack(x) for x in arrays]
    for t in leaves:
        t.requires_grad = True
    dout = normal(1, 130, 4, 64)
    out = ops.flash_attention(*leaves)
    out.backward(dout)
    ours = with_gradients(ct.flash_attention, [x.requires_grad_() for x in arrays], dout)
    assert torch.equal(torch.from_dlpack(out.detach()), ours[0])
    for t, g in zip(leaves, ours[1:]):
        torch.testing.assert_close(torch.from_dlpack(t.grad), g.float(), rtol=2**-8, atol=2**-8)


def test_samples_on_the_gpu():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], device="cuda").log().repeat(20_000, 1)
    tokens, _ = ops.sample(logits, top_k=2, seed=3)
    shares = torch.from_dlpack(tokens).bincount().float() / 20_000
    assert shares.shape == (2,) and abs(shares[0].item() - 4 / 7) < 4 * (4 / 7 * 3 / 7 / 20_000) ** 0.5


def test_opcheck():
    q, k, v = qkv(1, 65, 4, 2, 64)
    sinks = normal(4, dtype=torch.float32).requires_grad_()
    library.opcheck(torch.ops.cohort.attention, (q, k, v, None, sinks, None, None, None, None, True, 0, -1, 0.0, 0.0))
    x, w = normal(3, 64).requires_grad_(), normal(64).requires_grad_()
    library.opcheck(torch.ops.cohort.rms_norm, (x, w, 1e-5))
    library.opcheck(torch.ops.cohort.swiglu, (x,))


def test_compiled_functions_equal_eager_ones():
    def block(q, k, v):
        return ct.flash_attention(q, k, v, window=50).square()

    inputs, dout = qkv(2, 200, 4, 2, 64), normal(2, 200, 4, 64)
    eager = with_gradients(block, inputs, dout)
    for a, b in zip(with_gradients(torch.compile(block, fullgraph=True), inputs, dout), eager):
        # The compiled square rounds once to bf16, where the eager one rounds each step.
        assert (a.float() - b.float()).norm() <= 2**-6 * b.float().norm()


def test_a_cuda_graph_replays_attention():
    q, k, v = (x.detach() for x in qkv(1, 256, 4, 4, 64))
    expected = ct.flash_attention(q, k, v).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ct.flash_attention(q, k, v)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
