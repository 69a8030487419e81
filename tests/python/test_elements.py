"""cohort.Tensor as a sequence and a number, beside numpy: indices, values, arithmetic, comparisons that are refused."""
import collections.abc

import cohort
import numpy as np
import pytest
from cohort import ops

X = np.arange(120.0).reshape(4, 5, 6)
KEYS = [0, -1, np.int64(2), slice(None), slice(1, 3), slice(-3, None), slice(None, None, 2), slice(3, 1), slice(9, None), ...,
        (), (1, 2, 3), (..., 1), (1, ...), (slice(None), -2), (slice(1, 4, 2), ..., slice(None, None, 3)), (1, ..., 2, 3, 4)[:4],
        (slice(0, 4, 99), 0), (slice(None), slice(2, 2), 1), (0, slice(None), slice(5, None, 2**60))]


def leaf(array):
    t = cohort.from_dlpack(np.array(array))
    t.requires_grad = True
    return t


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_an_index_is_the_view_that_numpy_gives(key):
    t, expected = cohort.from_dlpack(X)[key], X[key]
    assert t.shape == expected.shape
    np.testing.assert_array_equal(t.numpy(), expected)
    if expected.size > 1:
        assert t.data_ptr == expected.__array_interface__["data"][0]
        assert np.may_share_memory(t.numpy(), X)


def test_an_index_of_a_strided_tensor_and_an_op_of_the_view():
    x = X.transpose(2, 0, 1)[::2]
    np.testing.assert_array_equal(cohort.from_dlpack(x)[1:, ..., ::2][0].numpy(), x[1:, ..., ::2][0])
    np.testing.assert_array_equal(ops.square(cohort.from_dlpack(X)[:, 1::2]).numpy(), X[:, 1::2] ** 2)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_gradients_pass_through_an_index(key):
    x = leaf(X)
    y = ops.square(x)[key]
    assert y.requires_grad
    seed = np.random.default_rng(3).standard_normal(y.shape)
    y.backward(seed)
    expected = np.zeros_like(X)
    expected[key] = seed * 2 * X[key]
    np.testing.assert_allclose(x.grad.numpy(), expected)


def test_gradients_of_several_indices_add_up():
    x = leaf(X)
    ops.sum(x[0] + x[1:3, :, :][1] * x[0]).backward()
    expected = np.zeros_like(X)
    expected[0], expected[2] = 1 + X[2], X[0]
    np.testing.assert_allclose(x.grad.numpy(), expected)


@pytest.mark.parametrize("key, error, text", [
    (4, IndexError, "out of range for dimension 0"), (-5, IndexError, "out of range"), (2**70, IndexError, "index"),
    ((0, 0, 0, 0), IndexError, "more dimensions"), ((..., 0, ...), IndexError, r"one \.\.\."),
    (None, cohort.InputError, "hint"), (True, cohort.InputError, "bool"), ([0, 1], cohort.InputError, "embedding"),
    (np.array([0, 1]), cohort.InputError, "embedding"), (1.0, cohort.InputError, "float"), ("a", cohort.InputError, "str"),
    (slice(None, None, -1), cohort.InputError, "negative step"), (slice(None, None, 0), ValueError, "zero"),
    (slice("a"), TypeError, "slice"),
])
def test_indices_that_are_refused(key, error, text):
    with pytest.raises(error, match=text):
        cohort.from_dlpack(X)[key]


def test_a_tensor_is_a_sequence_of_its_rows():
    t = cohort.from_dlpack(X)
    assert len(t) == 4 and isinstance(t, collections.abc.Iterable)
    assert [row.shape for row in t] == [(5, 6)] * 4
    first, *rest = t
    assert first.data_ptr == t.data_ptr and rest[-1].tolist() == X[-1].tolist()
    scalar = cohort.from_dlpack(np.array(3.0))
    for use in (len, iter):
        with pytest.raises(TypeError, match="without dimensions"):
            use(scalar)


@pytest.mark.parametrize("dtype, kind", [("float64", float), ("float32", float), ("float16", float), ("bfloat16", float),
                                         ("int32", int), ("int64", int), ("uint8", int)])
def test_values_are_numbers_of_python(dtype, kind):
    t = cohort.from_dlpack(np.array([[1, 2, 3], [4, 5, 6]], np.float64)).to(dtype)
    assert t.tolist() == [[1, 2, 3], [4, 5, 6]] and type(t.tolist()[0][0]) is kind
    assert t[1, 2].item() == 6 and type(t[1, 2].item()) is kind and t[:1, :1].item() == 1
    assert t[0, 0].tolist() == 1 and t[:0].tolist() == []
    for wrong in (t, t[:0]):
        with pytest.raises(cohort.InputError, match="one element.*hint"):
            wrong.item()
        with pytest.raises(cohort.InputError, match="hint.*conditions"):
            bool(wrong)
    assert t[0, 0] and not (cohort.from_dlpack(np.zeros(1)).to(dtype))
    large = 2**53 + 1
    assert cohort.from_dlpack(np.array([large])).item() == large


def test_numpy_reads_a_tensor():
    x = np.arange(6.0).reshape(2, 3)
    t = cohort.from_dlpack(x)
    assert np.shares_memory(np.asarray(t), x) and not np.shares_memory(np.array(t), x)
    assert np.asarray(t, np.float32).dtype == np.float32 and np.asarray(t).dtype == np.float64
    np.testing.assert_array_equal(np.exp(t), np.exp(x))
    np.testing.assert_array_equal(np.stack([t, t]), np.stack([x, x]))
    half = t.to("bfloat16")
    assert np.asarray(half).dtype == np.float32 and half.__array__().tolist() == x.tolist()
    with pytest.raises(ValueError, match="hint: numpy.asarray"):
        half.__array__(copy=False)


OPERATORS = [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b]


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("other", [3, -0.5, True, np.float32(1.5), np.float64(7), np.int32(2), np.array(2.5), X + 1])
def test_arithmetic_is_that_of_numpy(op, other):
    x = X + 0.5
    t = cohort.from_dlpack(x)
    for result, expected in ((op(t, other), op(x, other)), (op(other, t), op(other, x))):
        assert isinstance(result, cohort.Tensor) and result.dtype == "float64"
        np.testing.assert_array_equal(result.numpy(), expected)


def test_arithmetic_has_gradients_and_keeps_the_dtype():
    a, b = leaf([1.0, 2.0, 4.0]), leaf([3.0, 5.0, 7.0])
    ops.sum((2 - a) * b / 4 + 1 / a - (-b)).backward()
    np.testing.assert_allclose(a.grad.numpy(), -b.numpy() / 4 - 1 / a.numpy() ** 2)
    np.testing.assert_allclose(b.grad.numpy(), (2 - a.numpy()) / 4 + 1)
    ops.sum(np.full(3, 2.0) * a).backward()  # with the array first, too
    np.testing.assert_allclose(a.grad.numpy(), 2 - b.numpy() / 4 - 1 / a.numpy() ** 2)
    t = cohort.from_dlpack(np.ones(2, np.float32))
    assert (t * 3).dtype == "float32" and (t.detach()[:0] + 1).shape == (0,)
    t += 1
    assert t.tolist() == [2, 2]


def test_arithmetic_that_is_refused():
    t = cohort.from_dlpack(X)
    for wrong in (X[0], X.astype(np.float32), X[None], leaf(1.0)):
        with pytest.raises(cohort.InputError, match="one shape, dtype and device.*hint"):
            t + wrong
        with pytest.raises(cohort.InputError, match="one shape, dtype and device.*hint"):
            wrong - t
    with pytest.raises(cohort.InputError, match="float type.*hint"):
        cohort.from_dlpack(np.arange(3)) + 1
    for wrong in ("a", None, [1, 2], 1j):
        with pytest.raises(TypeError):
            t * wrong
    with pytest.raises(OverflowError):
        t * 10**400


def test_comparison_by_value_is_refused_and_identity_stays():
    t = cohort.from_dlpack(X)
    same_values = cohort.from_dlpack(X)
    for other in (same_values, X, 3, np.float64(3)):
        for compare in (lambda a, b: a == b, lambda a, b: a != b, lambda a, b: a < b, lambda a, b: a <= b,
                        lambda a, b: a > b, lambda a, b: a >= b):
            for pair in ((t, other), (other, t)):
                with pytest.raises(cohort.InputError, match="hint: compare t.numpy"):
                    compare(*pair)
    with pytest.raises(cohort.InputError, match="hint: compare t.numpy"):
        3.0 in t  # noqa: B015
    assert t != None and t != "all" and not t == {}  # noqa: E711
    assert t in [t] and [t] == [t] and {t: 1}[t] == 1 and len({t, same_values}) == 2
