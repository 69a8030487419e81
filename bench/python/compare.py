#!/usr/bin/env python3
"""The Python package beside PyTorch, CuPy and numba: one table of medians. Bursts of the compared implementations alternate, with
pauses between them, and the first burst of each does not count. Packages that are not installed are left out.

  bench/python/compare.py [--json FILE] [--device cpu]
  bench/python/compare.py --program build/cuda/bench/cohort_bench_attention   also the C++ benchmark's attention

Attention: 16,384 tokens in sequences of 4,096, causal, bf16; FLOPs of the visible half, five matmuls in the backward. cohort.ops
adds its gradients to f32 leaves. Overhead: host time of a call with tiny tensors, without synchronization.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time

import cohort
import cohort.torch as ct
import numpy as np
import torch
from cohort import ops
from torch.nn.attention import SDPBackend, sdpa_kernel

BURSTS, BURST_SECONDS, MAX_LAUNCHES = 9, 0.1, 20
SDPA = torch.nn.functional.scaled_dot_product_attention


def optional(name):
    try:
        return __import__(name, fromlist=["cuda"])
    except ImportError:
        return None


cupy, numba_cuda = optional("cupy"), optional("numba.cuda")


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # all streams of the device


def usable(name, call):
    """False, with a message, for what this GPU or this installation lacks."""
    try:
        call()
        synchronize()
        return True
    except Exception as error:
        print(f"{name} is left out: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        return False


def timed(call, launches):
    synchronize()
    begin = time.perf_counter()
    for _ in range(launches):
        call()
    synchronize()
    return (time.perf_counter() - begin) / launches


def host_time(call, launches):
    synchronize()
    begin = time.perf_counter()
    for _ in range(launches):
        call()
    return (time.perf_counter() - begin) / launches


def medians(calls, time_of=timed, launches=None):
    """{name: median seconds of a launch} of {name: call}, or of what has a method burst(launches)."""
    times = {name: [] for name in calls}
    bursts = {name: getattr(call, "burst", lambda n, call=call: time_of(call, n)) for name, call in calls.items()}
    counts = {name: launches or max(1, min(MAX_LAUNCHES, int(BURST_SECONDS / max(burst(2), 1e-9))))
              for name, burst in bursts.items() if usable(name, lambda: burst(2))}  # the first launches load and compile
    for _ in range(BURSTS):
        for name, count in counts.items():
            time.sleep(0.03)
            times[name].append(bursts[name](count))
    return {name: statistics.median(times[name][1:]) for name in counts}


class Program:
    """A pass of a case of cohort_bench_attention, which times the requested bursts itself."""

    def __init__(self, path, case, which):
        names = subprocess.run([path, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        self.number = [line.split("\t")[0] for line in names].index(case)
        self.which = which
        self.process = subprocess.Popen([path, "--obey"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def burst(self, launches):
        print(self.number, self.which, launches, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline() or sys.exit("compare.py: cohort_bench_attention ended: see above"))

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


class OpsBackward:
    """Backwards of cohort.ops, each of a graph of its own."""

    def __init__(self, leaves, dout):
        self.leaves, self.dout = leaves, dout

    def burst(self, launches):
        outs = iter([ops.flash_attention(*self.leaves) for _ in range(launches)])
        return timed(lambda: next(outs).backward(self.dout), launches)


def attention(device, program):
    on_gpu = device == "cuda"
    batch, length, dtype = (4, 4096, torch.bfloat16) if on_gpu else (1, 256, torch.float32)
    for dim in (64, 128):
        heads = 2048 // dim
        qkv = torch.randn(batch, length, 3 * heads, dim, device=device, dtype=dtype)
        ours = [x.detach().requires_grad_() for x in qkv.split(heads, 2)]
        theirs = [x.detach().contiguous().transpose(1, 2).requires_grad_() for x in ours]
        constants, leaves = ([cohort.from_dlpack(x.detach()) for x in ours] for _ in range(2))
        for t in leaves:
            t.requires_grad = True
        dout = torch.randn(batch, length, heads, dim, device=device, dtype=dtype)
        backends = {"torch SDPA flash": SDPBackend.FLASH_ATTENTION, "torch SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
        if not on_gpu:
            backends = {"torch SDPA": SDPBackend.MATH}

        def sdpa(backend):
            with sdpa_kernel(backend):
                return SDPA(*theirs, is_causal=True)

        backends = {name: backend for name, backend in backends.items() if usable(name, lambda: sdpa(backend))}

        def forwards():
            def without_gradients(call):
                with torch.no_grad():
                    return call()
            calls = {"cohort.torch": lambda: without_gradients(lambda: ct.flash_attention(*ours)),
                     "cohort.ops": lambda: ops.flash_attention(*constants)}
            for name, backend in backends.items():
                calls[name] = lambda backend=backend: without_gradients(lambda: sdpa(backend))
            return calls

        def backwards():
            def gradients(out, inputs, dout):
                return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
            calls = {"cohort.torch": gradients(ct.flash_attention(*ours), ours, dout),
                     "cohort.ops": OpsBackward(leaves, cohort.from_dlpack(dout))}
            for name, backend in backends.items():
                calls[name] = gradients(sdpa(backend), theirs, dout.transpose(1, 2))
            return calls

        flops = batch * heads * length * (length + 1) * dim
        for which, matmuls, calls in (("forward", 2, forwards()), ("backward", 5, backwards())):
            if program:
                calls["C++ benchmark"] = Program(program, f"d{dim} causal 4k", which)
            found = medians(calls)
            if program:
                calls["C++ benchmark"].end()
            for name, seconds in found.items():
                ratio = f", {found['C++ benchmark'] / seconds:.3f} of C++" if program else ""
                yield f"attention d{dim} {which}", name, seconds, f"{matmuls * flops / seconds * 1e-12:.1f} TFLOP/s{ratio}"


def overhead(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [torch.randn(1, 16, 1, 64, device=device, dtype=dtype) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    constants = [cohort.from_dlpack(x) for x in tensors]
    rest = (*[None] * 6, True, 0, -1, 0.0, 0.0)
    calls = {"cohort.ops": lambda: ops.flash_attention(*constants),
             "autograd.Function": lambda: ct.flash_attention(*leaves),
             "autograd.Function, no gradient": lambda: ct.flash_attention(*tensors),
             "custom op": lambda: torch.ops.cohort.attention(*leaves, *rest),
             "custom op, no gradient": lambda: torch.ops.cohort.attention(*tensors, *rest),
             "torch SDPA": lambda: SDPA(*leaves, is_causal=True),
             "torch SDPA, no gradient": lambda: SDPA(*tensors, is_causal=True)}
    for name, seconds in medians(calls, host_time, 200).items():
        yield "overhead of attention", name, seconds, ""


# One block for each row: the maximum and the sum of exponentials of strided elements, then of the block.
SOFTMAX = r"""
extern "C" __global__ void softmax(const float* x, float* y, int columns) {
  __shared__ float parts[256];
  const float lowest = __int_as_float(0xff800000);  // -infinity
  x += (size_t)blockIdx.x * columns;
  y += (size_t)blockIdx.x * columns;
  float m = lowest, l = 0;
  for (int c = threadIdx.x; c < columns; c += 256) {
    const float next = fmaxf(m, x[c]);
    l = l * __expf(m - next) + __expf(x[c] - next);
    m = next;
  }
  parts[threadIdx.x] = m;
  __syncthreads();
  float top = lowest;
  for (int i = 0; i < 256; ++i) top = fmaxf(top, parts[i]);
  __syncthreads();
  parts[threadIdx.x] = l * __expf(m - top);
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 256; ++i) sum += parts[i];
  for (int c = threadIdx.x; c < columns; c += 256) y[c] = __expf(x[c] - top) / sum;
}"""


def numba_softmax(x, y):
    import math

    import numba

    @numba_cuda.jit
    def kernel(x, y):
        parts = numba_cuda.shared.array(256, numba.float32)
        row, thread = numba_cuda.blockIdx.x, numba_cuda.threadIdx.x
        top, total = numba.float32(-math.inf), numba.float32(0)
        for c in range(thread, x.shape[1], 256):
            top = max(top, x[row, c])
        parts[thread] = top
        numba_cuda.syncthreads()
        for i in range(256):
            top = max(top, parts[i])
        numba_cuda.syncthreads()
        for c in range(thread, x.shape[1], 256):
            total += math.exp(x[row, c] - top)
        parts[thread] = total
        numba_cuda.syncthreads()
        total = numba.float32(0)
        for i in range(256):
            total += parts[i]
        for c in range(thread, x.shape[1], 256):
            y[row, c] = math.exp(x[row, c] - top) / total
    views = numba_cuda.as_cuda_array(x), numba_cuda.as_cuda_array(y)
    return lambda: kernel[x.shape[0], 256](*views)


def kernels(device):
    """Softmax and matmul. Cohort has no softmax of its own: it is a part of attention and of the head."""
    on_gpu = device == "cuda"
    rows, columns = (16384, 4096) if on_gpu else (64, 256)
    x = torch.randn(rows, columns, device=device)
    y = torch.empty_like(x)
    calls = {"torch": lambda: torch.softmax(x, -1)}
    if cupy and on_gpu:
        kernel, views = cupy.RawKernel(SOFTMAX, "softmax"), (cupy.from_dlpack(x), cupy.from_dlpack(y))
        calls["CuPy RawKernel"] = lambda: kernel((rows,), (256,), (*views, np.int32(columns)))
    if numba_cuda and on_gpu:
        calls["numba"] = numba_softmax(x, y)
    for name, call in calls.items():
        if usable(name, call) and name != "torch":
            torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-4, atol=1e-6)
    for name, seconds in medians(calls).items():
        yield f"softmax f32 {rows} x {columns}", name, seconds, f"{2 * x.nbytes / seconds * 1e-9:.0f} GB/s"

    n = 4096 if on_gpu else 256
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    calls = {}
    for dtype in (torch.bfloat16, torch.float16) if on_gpu else (torch.float32,):
        calls[str(dtype).replace(".", " ")] = lambda a=a.to(dtype), b=b.to(dtype): a @ b.T
    ours = [cohort.from_dlpack(t.to(torch.bfloat16) if on_gpu else t) for t in (a, b)]
    calls[f"cohort.ops.linear {ours[0].dtype}"] = lambda: ops.linear(*ours)
    if cupy and on_gpu:
        halves = [cupy.from_dlpack(t.half()) for t in (a, b)]
        calls["CuPy float16"] = lambda: cupy.matmul(halves[0], halves[1].T)
    for name, seconds in medians(calls).items():
        yield f"matmul {n} x {n} x {n}", name, seconds, f"{2 * n**3 / seconds * 1e-12:.1f} TFLOP/s"


def copies(device):
    if device != "cuda":
        return
    pageable = torch.ones(1 << 26)
    pinned, target = pageable.pin_memory(), torch.empty(1 << 26, device="cuda")
    sources = {"pageable": pageable, "pinned": pinned}
    calls = {f"torch, {name}": lambda t=t: target.copy_(t, non_blocking=True) for name, t in sources.items()}
    calls |= {f"cohort, {name}": lambda t=cohort.from_dlpack(t): t.to("cuda") for name, t in sources.items()}
    for name, seconds in medians(calls).items():
        yield "256 MiB to the GPU", name, seconds, f"{pageable.nbytes / seconds * 1e-9:.1f} GB/s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small sizes, to try the script")
    parser.add_argument("--program", help="cohort_bench_attention of the same kernels")
    parser.add_argument("--json", help="a file for the rows of the table")
    options = parser.parse_args()
    if options.device == "cuda" and (not torch.cuda.is_available() or cohort.cuda_device_count() == 0):
        parser.error("no GPU that both torch and cohort can use; hint: --device cpu")
    torch.manual_seed(1)
    if options.device == "cpu":
        torch.set_num_threads(1)  # the two libraries' threads would compete
    rows = []
    for part in (overhead(options.device), attention(options.device, options.program), kernels(options.device),
                 copies(options.device)):
        for case, name, seconds, rate in part:
            rows.append({"case": case, "implementation": name, "microseconds": seconds * 1e6, "rate": rate})
            print(f"{case:28} {name:32} {seconds * 1e6:10.1f} us  {rate}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "cohort": cohort.__version__, "device": torch.cuda.get_device_name()
                       if options.device == "cuda" else "cpu", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
