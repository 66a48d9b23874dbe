"""Kernels with one fault each, or none, for the tests of `thresher bench compile`."""

import triton
import triton.language as tl

from thresher.kernels.registry import ProgramWork, Specialisation


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2.0, mask=i < n)


@triton.jit
def centre(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x - tl.sum(x, 0))


@triton.jit
def drift(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    for _ in range(n):
        x = x - tl.sum(x, 0)
    tl.store(x_ptr + i, x)


@triton.jit
def conjure(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    x = tl.inline_asm_elementwise("conjure.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(x_ptr + i, x)


@triton.jit
def multiply(x_ptr, w_ptr, y_ptr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    row, column, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, 64)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, H, 64):
        x = tl.load(x_ptr + row[:, None] * H + depth[None, :] + start)
        w = tl.load(w_ptr + column[None, :] * H + depth[:, None] + start)
        y = tl.dot(x, w, y, input_precision="ieee" if EXACT else "tf32")
    tl.store(y_ptr + row[:, None] * COLUMNS + column[None, :], y)


def rows(name, kernel, block, **more):
    signature = {"x_ptr": "*fp32", "n": "i32"}
    return Specialisation(
        name=name, kernel=kernel, signature=signature, constants={"BLOCK": block}, aligned=("x_ptr",), **more
    )


def product(name, dtype, rows, columns, **more):
    pointers = ("x_ptr", "w_ptr", "y_ptr")
    return Specialisation(
        name=name,
        kernel=multiply,
        signature=dict.fromkeys(pointers, dtype) | {"y_ptr": "*fp32"},
        aligned=pointers,
        constants={"H": 896, "ROWS": rows, "COLUMNS": columns, "EXACT": dtype == "*bf16"},
        **more,
    )


def specialisations():
    return (
        rows("sound", double, 1024),
        product("sound product", "*bf16", 64, 128, tensor_cores=True),
        rows("spilling", drift, 32768),  # 256 values per thread, which has 255 registers
        rows("spilling once", centre, 32768),
        rows("wide", centre, 1024, wide=True, work=ProgramWork(flops=0, bytes=8192)),
        rows("narrow", double, 2048, wide=True),  # a mask by a count of which no divisor is known
        product("few rows", "*bf16", 16, 128, tensor_cores=True, wgmma=False, maxnreg=64),
        product("sprawling", "*bf16", 64, 128, tensor_cores=True, num_stages=12),
        product("inexact", "*fp32", 64, 32),
        rows("elsewhere", double, 256, capabilities=(90,)),
        rows("plain", double, 512, tensor_cores=True),
        rows("refused", conjure, 128),
    )
