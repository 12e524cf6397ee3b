"""8-bit keys and values as fp16, which holds each number of e4m3, e5m2, int8; and q to match."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_E4M3 = (
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
_E5M2 = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"
# Bytes of 0 to 255 as the low bits of 1024 to 1279, less 1152.
_INT8 = (
    "{ .reg .b32 x, y, z; xor.b32 x, $2, 0x80808080; mov.b32 y, 0x64646464; mov.b32 z, 0x64806480;"
    " prmt.b32 $0, x, y, 0x4140; prmt.b32 $1, x, y, 0x4342;"
    " sub.rn.f16x2 $0, $0, z; sub.rn.f16x2 $1, $1, z; }"
)
KINDS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_ASM = gl.constexpr([_E4M3, _E5M2, _INT8])


@gluon.jit
def to_fp16(x, KIND: gl.constexpr):
    """Four bytes in a register as fp16, exactly."""
    ASM: gl.constexpr = _ASM[KIND]
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r", [x], dtype=gl.float16, is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def q_as_fp16(q):
    """q as fp16 times a power of two; see `triton_attention._as_fp16`."""
    q = q.to(gl.float32)
    size = gl.where(gl.abs(q) < float("inf"), gl.abs(q), 0.0)
    largest = gl.max(gl.max(size, axis=1), axis=0).to(gl.int32, bitcast=True)
    exponent = gl.maximum(largest >> 23, 16)
    shrink = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    grow = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    return (q * shrink).to(gl.float16), grow
