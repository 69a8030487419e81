"""cohort.Tensor: sharing memory with numpy by DLPack, what it refuses, gradients, forked children."""
import gc
import os
import weakref

import cohort
import numpy as np
import pytest
from cohort import ops

DTYPES = ["float64", "float32", "float16", "int32", "int64", "uint8"]


class Exporter:
    """An array whose capsule is given."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.capsule


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trips_share_memory_and_strides(dtype):
    x = np.arange(24, dtype=dtype).reshape(4, 6)[1:, ::2]
    t = cohort.from_dlpack(x)
    y = np.from_dlpack(t)
    assert (t.shape, t.dtype, t.device) == ((3, 3), dtype, "cpu")
    assert t.data_ptr == x.ctypes.data == y.ctypes.data
    assert t.strides == (6, 2) and y.strides == x.strides
    x[0, 0] = 77
    assert y[0, 0] == t.numpy()[0, 0] == 77


def test_jax_shares_memory():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    t = ops.exp(jnp.arange(6, dtype=jnp.float32).reshape(2, 3))
    x = jnp.from_dlpack(t)
    assert x.unsafe_buffer_pointer() == t.data_ptr and x.shape == (2, 3)
    np.testing.assert_allclose(np.asarray(x), np.exp(np.arange(6)).reshape(2, 3), rtol=1e-6)
    assert cohort.from_dlpack(jnp.ones(3, jnp.bfloat16), copy=True).dtype == "bfloat16"


def test_float16_is_converted_as_numpy_does_and_refused_by_ops():
    x = np.concatenate([np.random.default_rng(3).standard_normal(5000) * 10.0 ** np.arange(-4, 1).repeat(1000),
                        [0.0, -0.0, 65504, 65519.9, 65520, -np.inf, np.nan, 2.0**-24, 2.0**-25, 2.0**-14]])
    for dtype in (np.float64, np.float32):
        y = cohort.from_dlpack(x.astype(dtype)).to("float16")
        with np.errstate(over="ignore"):
            expected = x.astype(dtype).astype(np.float16)
        np.testing.assert_array_equal(y.numpy(), expected)
        np.testing.assert_array_equal(y.to("float32").numpy(), expected.astype(np.float32))
    with pytest.raises(cohort.Error, match="f16"):
        ops.silu(y)
    with pytest.raises(cohort.Error, match="f16"):
        y.requires_grad = True


def test_memory_lives_as_long_as_its_last_view():
    class Owner(np.ndarray):
        pass

    x = np.zeros(3).view(Owner)
    alive = weakref.ref(x)
    t = cohort.from_dlpack(x)
    view = np.from_dlpack(t)
    del x, t
    gc.collect()
    assert alive() is not None and view.sum() == 0
    del view
    gc.collect()
    assert alive() is None


def test_an_unused_capsule_frees_its_tensor():
    class Owner(np.ndarray):
        pass

    for version in (None, (1, 0)):
        x = np.zeros(3).view(Owner)
        alive = weakref.ref(x)
        capsule = cohort.from_dlpack(x).__dlpack__(max_version=version)
        assert ("versioned" in repr(capsule)) == (version is not None)
        del x
        assert alive() is not None
        del capsule
        gc.collect()
        assert alive() is None


def test_a_capsule_is_used_once():
    array = Exporter(cohort.from_dlpack(np.zeros(3)).__dlpack__())
    assert cohort.from_dlpack(array).shape == (3,)
    with pytest.raises(cohort.InputError, match="not been used"):
        cohort.from_dlpack(array)
    with pytest.raises(cohort.InputError, match="not been used"):
        cohort.from_dlpack(Exporter(None))
    for device in (5, (2**70, 0), ("cpu", 0)):
        array.__dlpack_device__ = lambda device=device: device
        with pytest.raises(cohort.InputError, match="__dlpack_device__"):
            cohort.from_dlpack(array)
    with pytest.raises(TypeError):
        cohort.from_dlpack(array.capsule)  # it does not say which stream writes its memory


@pytest.mark.parametrize("array, text", [
    (np.zeros(3, np.uint16), "uint16 are not supported; hint: convert them to float64, float32, float16, bfloat16, int32"),
    (np.zeros(3, complex), "complex128"),
    (np.zeros(3)[::-1], "negative strides"),
    (np.broadcast_to(np.zeros(1), 3), "read-only; hint: from_dlpack(x, copy=True)"),
    (np.zeros((1,) * 7), "rank exceeds 6"),
])
def test_what_a_tensor_cannot_view_is_refused(array, text):
    with pytest.raises(cohort.Error) as error:
        cohort.from_dlpack(array)
    assert text in str(error.value)


def test_copies_and_read_only_memory():
    x = np.arange(3.0)
    x.flags.writeable = False
    t = cohort.from_dlpack(x, copy=True)
    assert t.data_ptr != x.ctypes.data and t.numpy().tolist() == [0, 1, 2]
    assert ops.square(x).numpy().tolist() == [0, 1, 4]  # ops only read their arguments
    grid = np.arange(6.0).reshape(2, 3)
    assert cohort.from_dlpack(grid[::-1, ::-2], copy=True).tolist() == [[5, 3], [2, 0]]
    assert cohort.from_dlpack(np.array(2.5), copy=True).shape == ()
    flags = cohort.from_dlpack(np.array([True, False]))
    assert flags.dtype == "uint8" and flags.tolist() == [1, 0]


def test_export_arguments():
    t = cohort.from_dlpack(np.arange(3.0))
    assert t.__dlpack_device__() == (1, 0)
    copied = cohort.from_dlpack(Exporter(t.__dlpack__(copy=True)))
    assert copied.data_ptr != t.data_ptr and copied.numpy().tolist() == [0, 1, 2]
    with pytest.raises(BufferError, match="own device"):
        t.__dlpack__(dl_device=(2, 0))


def test_conversions():
    t = cohort.from_dlpack(np.array([1, 2.5, 1 + 2**-9], np.float32)).to("bfloat16")
    assert t.dtype == "bfloat16" and t.numpy().tolist() == [1, 2.5, 1] and t.numpy().dtype == np.float32
    assert cohort.from_dlpack(Exporter(t.__dlpack__())).dtype == "bfloat16"
    assert t.to("cpu").data_ptr == t.data_ptr
    with pytest.raises(cohort.InputError, match="'gpu'"):
        t.to("gpu")


def test_gradients():
    x = cohort.from_dlpack(np.array([1.0, 2.0, 3.0]))
    assert not x.requires_grad and x.grad is None
    x.requires_grad = True
    y = ops.mul(x, x)
    seed = np.array([1.0, 10.0, 100.0])
    y.backward(seed)
    assert x.grad.numpy().tolist() == [2, 40, 600] and seed.tolist() == [1, 10, 100]
    ops.sum(x).backward()
    assert x.grad.numpy().tolist() == [3, 41, 601]
    x.zero_grad()
    assert x.grad.numpy().tolist() == [0, 0, 0]
    with pytest.raises(cohort.Error):
        y.backward(seed)  # its graph is gone
    assert not x.detach().requires_grad
    with pytest.raises(cohort.Error, match="no gradient"):
        cohort.from_dlpack(np.arange(3)).requires_grad = True


def test_a_seed_and_a_view_of_it_stay_as_they_are():
    x = cohort.from_dlpack(np.ones(3))
    x.requires_grad = True
    seed = np.ones(3)
    ops.add(x, x).backward(cohort.from_dlpack(seed))
    assert seed.tolist() == [1, 1, 1] and x.grad.numpy().tolist() == [2, 2, 2]


def test_errors_are_exceptions_of_both_families():
    assert issubclass(cohort.Error, RuntimeError)
    assert issubclass(cohort.InputError, (cohort.Error)) and issubclass(cohort.InputError, ValueError)
    with pytest.raises(cohort.Error, match=r"\[linear_forward\]|\[linear\]"):
        ops.linear(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(TypeError):
        ops.linear("x", 3)


def test_version():
    assert cohort.__version__.count(".") == 2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("leaves_by", ["exit", "_exit"])
def test_a_forked_child_gets_an_error_and_ends(leaves_by):
    x = np.random.rand(256, 256)
    ops.linear(x, x)  # starts threads
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ops.linear(x, x)
        except cohort.Error as error:
            code = 42 if "forked" in str(error) and "spawn" in str(error) else 2
        if leaves_by == "exit":
            import ctypes
            ctypes.CDLL(None).exit(code)  # with C's handlers and destructors of thread-local objects
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert ops.linear(x, x).shape == (256, 256)  # the parent's threads still work


def test_devices():
    cohort.synchronize("cpu")
    if cohort.cuda_device_count() == 0:
        with pytest.raises(cohort.InputError, match="cuda:3"):
            cohort.synchronize("cuda:3")
    with pytest.raises(cohort.InputError, match="expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"):
        cohort.synchronize("gpu")
