"""The peer of cohort_bench_ops --filter attention: PyTorch's FlashAttention-2 and cuDNN attention on the same shapes,
bf16, causal, random data. FLOPs count the causal half; two matmuls forward, five backward.

  python3 bench/peers/attention.py
"""
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Sequences, tokens of each, heads, key heads, head dim.
SHAPES = [(64, 256, 6, 6, 64), (32, 1024, 12, 12, 64), (8, 2048, 14, 2, 64), (4, 4096, 32, 32, 64), (4, 4096, 16, 16, 128)]


def seconds(call, calls=20, repeats=7):
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls)
    return sorted(times)[repeats // 2]


def main():
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for batch, length, heads, kv_heads, dim in SHAPES:
            q, k, v, dout = (torch.randn(batch, length, n, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                             for n in (heads, kv_heads, kv_heads, heads))
            options = {"is_causal": True, "enable_gqa": heads != kv_heads}
            for t in (q, k, v):
                t.requires_grad_(True)
            matmul_flops = batch * heads * length * (length + 1) * dim
            with sdpa_kernel(backend):
                forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, **options))
                o = F.scaled_dot_product_attention(q, k, v, **options)
                backward = seconds(lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True))
            print(f"{backend.name:16s} {batch} x {length} tokens, {heads}/{kv_heads} heads of {dim}: "
                  f"forward {forward * 1e6:.0f} us {2 * matmul_flops / forward * 1e-12:.0f} TFLOP/s, "
                  f"backward {backward * 1e6:.0f} us {5 * matmul_flops / backward * 1e-12:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
