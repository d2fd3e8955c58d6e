"""The C kernels as functions on torch tensors. Checks shapes by assert, allocates nothing but results.

Calls release the GIL and must come from one thread at a time. Every result row has the same bits whatever rows share
its batch and however many threads compute it.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from slipstream.host import available_threads
from slipstream.load.quantized.codes import Codes
from slipstream.runners.cpu.build import build
from slipstream.runners.cpu.packed import (
    BF16,
    BLOCK_TYPES,
    F32,
    STACK,
    W8,
    CodesRows,
    Layout,
    PackedWeight,
    code_arrays,
    packed_weight,
)
from slipstream.runners.cpu.pages import Pages
from slipstream.runners.cpu.quantize import q8_0_blocks

MAX_HEAD_DIM = 256
MAX_GROUP = 64  # query heads of a KV head


class _Rope(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "q_out", "k_cache", "v_cache", "positions", "rope_positions")),
        *((name, ctypes.c_void_p) for name in ("token_slot", "block_table", "cos", "sin", "q_norm", "k_norm")),
        ("ldx", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "num_kv_heads", "dim", "rot")),
        *((name, ctypes.c_int32) for name in ("block_size", "max_blocks", "per_chunk", "coded")),
        ("eps", ctypes.c_float),
    )


class _Attend(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "positions", "token_slot", "block_table")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "num_kv_heads", "dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "max_blocks", "coded")),
        ("scale", ctypes.c_float),
    )


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    arguments = {
        "ss_linear": (pointer, pointer, long, integer, pointer, long, pointer, pointer, long),
        "ss_pack_codes": (pointer, pointer, integer, integer),
        "ss_pack_raw": (pointer, integer, pointer, long, integer, integer),
        "ss_embed": (pointer, pointer, integer, pointer),
        "ss_packed_bytes": (integer, integer, integer),
        "ss_rms_norm": (pointer, pointer, real, integer, integer, pointer),
        "ss_silu_mul": (pointer, integer, integer, pointer),
        "ss_sigmoid_mul": (pointer, long, integer, integer, pointer),
        "ss_gdn": (pointer, pointer, long, pointer, integer, pointer),
        "ss_moe": (pointer, pointer, pointer, long, pointer, pointer, integer, pointer),
        "ss_log_softmax": (pointer, long, integer, integer, pointer),
        "ss_rope_store": (pointer,),
        "ss_layers": (pointer, integer, pointer),
        "ss_attend": (pointer,),
        "ss_sample": (pointer, long, integer, integer, pointer, pointer, pointer, pointer, pointer),
        "ss_set_threads": (integer,),
        "ss_pool_probe": (pointer, integer, integer),
        "ss_panel_rows": (),
        "ss_isa": (),
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    library.ss_packed_bytes.restype = long
    library.ss_set_threads.restype = library.ss_panel_rows.restype = integer
    library.ss_isa.restype = ctypes.c_char_p


def _rows(x: Tensor) -> None:
    assert x.dtype == torch.float32, x.dtype
    assert x.dim() == 2, x.shape
    assert x.stride(1) == 1, x.stride()


def _flat(x: Tensor, dtype: torch.dtype) -> int:
    assert x.dtype == dtype, (x.dtype, dtype)
    assert x.is_contiguous(), (x.shape, x.stride())
    return x.data_ptr()


class Kernels:
    """One compiled library. There is normally one for the process: see ``load``."""

    def __init__(self, library: ctypes.CDLL, num_threads: int | None = None):
        _declare(library)
        self._c = library
        self._pages = Pages()
        self._linear, self._norm, self._silu = library.ss_linear, library.ss_rms_norm, library.ss_silu_mul
        self.isa: str = library.ss_isa().decode()
        self.quantizes_x = self.isa != "portable"  # products with block formats quantize x to 15 bits: tile_integer.h
        self.panel_rows: int = library.ss_panel_rows()
        self.num_threads = 0
        self.set_threads(num_threads or available_threads())

    def set_threads(self, num_threads: int) -> int:
        """Use this many threads, the caller among them; returns how many there are now."""
        self.num_threads = self._c.ss_set_threads(num_threads)
        return self.num_threads

    # ---- weights ----

    def packed_bytes(self, layout: Layout, rows: int, cols: int) -> int:
        """What a matrix takes in the kernels' layout."""
        return int(self._c.ss_packed_bytes(layout.format, rows, cols))

    def empty(self, layout: Layout, rows: int, cols: int, order: Tensor | None = None) -> PackedWeight:
        """A matrix to be filled by the functions below, rows by rows."""
        assert rows > 0
        assert cols > 0
        data = self._pages.zeros(self.packed_bytes(layout, rows, cols))
        return packed_weight(layout, rows, cols, data, order=order)

    def fill_codes(self, weight: PackedWeight, row: int, codes: Codes) -> None:
        """Rows from ``row`` on. The layout is that of the codes' container: nothing is rounded."""
        layout, container = weight.layout, codes.container
        rows, cols = codes.codes.shape
        assert cols == weight.cols
        assert cols % 32 == 0
        assert row + rows <= weight.rows
        arrays = code_arrays(codes, layout)
        where = (None if each is None else each.ctypes.data for each in arrays)
        struct = CodesRows(*where, container.group, container.span, layout.bias)
        self._c.ss_pack_codes(weight.address, ctypes.addressof(struct), row, rows)

    def fill_blocks(self, weight: PackedWeight, row: int, dtype: str, blocks: np.ndarray) -> None:
        """The same from GGUF blocks of a type of BLOCK_TYPES. uint8 [rows, bytes of a row]"""
        assert blocks.dtype == np.uint8
        assert blocks.flags.c_contiguous
        self._fill_raw(weight, row, BLOCK_TYPES.index(dtype), blocks.ctypes.data, blocks.shape)

    def fill_floats(self, weight: PackedWeight, row: int, matrix: Tensor) -> None:
        """float32 or bfloat16 [rows, cols], kept as they are."""
        assert matrix.shape[1] == weight.cols
        assert weight.layout == (BF16 if matrix.dtype == torch.bfloat16 else F32)
        matrix = matrix.contiguous()
        shape = matrix.shape[0], matrix.shape[1] * matrix.element_size()
        self._fill_raw(weight, row, -1, matrix.data_ptr(), shape)

    def _fill_raw(self, weight: PackedWeight, row: int, kind: int, at: int, shape: tuple[int, ...]) -> None:
        rows, stride = shape
        assert row + rows <= weight.rows
        self._c.ss_pack_raw(weight.address, kind, at, stride, row, rows)

    def pack_float(self, matrix: Tensor) -> PackedWeight:
        """matrix: [rows, cols], float32 or bfloat16, kept as it is."""
        assert matrix.dtype in (torch.float32, torch.bfloat16)
        weight = self.empty(BF16 if matrix.dtype == torch.bfloat16 else F32, *matrix.shape)
        self.fill_floats(weight, 0, matrix)
        return weight

    def quantize_w8(self, matrix: Tensor) -> PackedWeight:
        """Quantize a float matrix to 8 bits, as GGUF's Q8_0."""
        weight = self.empty(W8, *matrix.shape)
        self.fill_blocks(weight, 0, "Q8_0", q8_0_blocks(matrix).numpy())
        return weight

    # ---- layers ----

    def embed(self, ids: Tensor, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
        """ids: int64 [T] -> rows of the matrix as float32 [T, cols]."""
        if out is None:
            out = torch.empty(ids.shape[0], weight.cols)
        assert out.shape == (ids.shape[0], weight.cols)
        assert weight.layout != STACK
        self._c.ss_embed(weight.address, _flat(ids, torch.int64), ids.shape[0], _flat(out, torch.float32))
        return out

    def linear(
        self, x: Tensor, weight: PackedWeight, out: Tensor, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """out [M, rows] = x [M, cols] @ weight.T (+ bias [rows]) (+ add [M, rows]); ``add`` may be ``out``."""
        _rows(x)
        _rows(out)
        assert x.shape[1] == weight.cols, (x.shape, weight)
        assert out.shape == (x.shape[0], weight.rows), (x.shape, out.shape, weight)
        bias_at = add_at = add_stride = None
        if bias is not None:
            assert bias.shape == (weight.rows,)
            bias_at = _flat(bias, torch.float32)
        if add is not None:
            _rows(add)
            assert add.shape == out.shape
            add_at, add_stride = add.data_ptr(), add.stride(0)
        self._linear(
            weight.address, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), out.stride(0),
            bias_at, add_at, add_stride or 0,
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """x: [M, K], weight: [K]; ``out`` may be ``x``."""
        rows, cols = x.shape
        assert weight.shape == (cols,)
        assert out.shape == x.shape
        at = _flat(x, torch.float32), _flat(weight, torch.float32), _flat(out, torch.float32)
        self._norm(at[0], at[1], eps, rows, cols, at[2])
        return out

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """gate_up: [M, 2 I] -> silu(gate) * up: [M, I]."""
        rows, cols = out.shape
        assert gate_up.shape == (rows, 2 * cols)
        self._silu(_flat(gate_up, torch.float32), rows, cols, _flat(out, torch.float32))
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """x [M, N] *= sigmoid(gate [M, N]), in place; gate may be a slice of columns."""
        _rows(gate)
        assert gate.shape == x.shape
        self._c.ss_sigmoid_mul(gate.data_ptr(), gate.stride(0), *x.shape, floats(x))
        return x

    # ---- attention and recurrence ----

    def rope_store(
        self,
        qkv: Tensor,  # [T, (Hq + 2 Hkv) D]
        q_out: Tensor,  # [T, Hq D]
        k_cache: Tensor,  # [num_blocks, Hkv, block_size, D], as caches() takes it
        v_cache: Tensor,
        positions: Tensor,  # int32 [T]: in the cache
        rope_positions: Tensor,  # int32 [T]: of the rotation
        token_slot: Tensor,  # int32 [T]
        block_table: Tensor,  # int32 [num_slots, max_blocks]
        cos: Tensor,  # [max_pos, rot / 2]
        sin: Tensor,
        q_norm: Tensor | None = None,  # [D]
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Norm (if any) and rotate queries and keys, half-split pairing; write keys and values into their blocks."""
        _, kv_heads, block_size, dim = k_cache.shape
        num_tokens, heads, rot = qkv.shape[0], q_out.shape[1] // dim, 2 * cos.shape[1]
        _rows(qkv)
        assert qkv.shape[1] == (heads + 2 * kv_heads) * dim
        assert q_out.shape == (num_tokens, heads * dim)
        assert rot <= dim <= MAX_HEAD_DIM
        assert positions.shape == rope_positions.shape == (num_tokens,)
        assert (q_norm is None) == (k_norm is None)
        assert token_slot.shape == (num_tokens,)
        assert cos.shape == sin.shape
        norms = (None, None) if q_norm is None or k_norm is None else (floats(q_norm), floats(k_norm))
        job = _Rope(
            qkv.data_ptr(), floats(q_out), *caches(k_cache, v_cache),
            _flat(positions, torch.int32), _flat(rope_positions, torch.int32), _flat(token_slot, torch.int32),
            _flat(block_table, torch.int32), floats(cos), floats(sin), *norms, qkv.stride(0),
            num_tokens, heads, kv_heads, dim, rot, block_size, block_table.shape[1], 0, coded(k_cache), eps,
        )  # fmt: skip
        self._c.ss_rope_store(ctypes.addressof(job))
        return q_out

    def attend(
        self,
        q: Tensor,  # [T, Hq D]
        k_cache: Tensor,  # [num_blocks, Hkv, block_size, D], as caches() takes it
        v_cache: Tensor,
        positions: Tensor,  # int32 [T]
        token_slot: Tensor,  # int32 [T]
        block_table: Tensor,  # int32 [num_slots, max_blocks]
        scale: float,
        out: Tensor,  # [T, Hq D]
    ) -> Tensor:
        """Each token sees positions 0 .. its own of its slot."""
        _, kv_heads, block_size, dim = k_cache.shape
        num_tokens, heads = q.shape[0], q.shape[1] // dim
        assert dim % 16 == 0
        assert dim <= MAX_HEAD_DIM
        assert heads % kv_heads == 0
        assert heads // kv_heads <= MAX_GROUP
        assert q.shape == out.shape
        assert positions.shape == token_slot.shape == (num_tokens,)
        job = _Attend(
            floats(q), *caches(k_cache, v_cache), _flat(positions, torch.int32),
            _flat(token_slot, torch.int32), _flat(block_table, torch.int32), floats(out),
            num_tokens, heads, kv_heads, dim, block_size, block_table.shape[1], coded(k_cache), scale,
        )  # fmt: skip
        self._c.ss_attend(ctypes.addressof(job))
        return out

    def gdn(self, layer: int, mixed: Tensor, rows: Tensor, out: Tensor) -> Tensor:
        """``layer``: address of a C struct, ``rows``: int32 [rows, 5]; see gdn.py."""
        _rows(mixed)
        assert out.shape[0] == mixed.shape[0]
        where = mixed.data_ptr(), mixed.stride(0), _flat(rows, torch.int32), rows.shape[0]
        self._c.ss_gdn(layer, *where, floats(out))
        return out

    def moe(self, layer: int, x: Tensor, scores: Tensor, shared: Tensor, residual: Tensor) -> Tensor:
        """``layer``: address of a C struct; see experts.py. scores: [T, experts + 1]; the rest [T, hidden]."""
        assert x.shape == shared.shape == residual.shape
        assert scores.shape[0] == x.shape[0]
        _rows(scores)
        out = torch.empty_like(x)
        self._c.ss_moe(
            layer, floats(x), scores.data_ptr(), scores.stride(0), floats(shared), floats(residual),
            x.shape[0], floats(out),
        )  # fmt: skip
        return out

    def run_layers(self, layers: int, num_layers: int, step: int) -> None:
        """Addresses of C structs: see layers.py."""
        self._c.ss_layers(layers, num_layers, step)

    # ---- sampling ----

    def argmax(self, logits: Tensor, conf: Tensor | None = None) -> Tensor:
        """logits: [S, V] -> ids int64 [S], ties to the lowest; ``conf`` [S] takes their softmax probability."""
        _rows(logits)
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        assert conf is None or conf.shape == ids.shape
        conf_at = None if conf is None else floats(conf)
        size = logits.stride(0), *logits.shape
        self._c.ss_sample(logits.data_ptr(), *size, None, None, None, ids.data_ptr(), conf_at)
        return ids

    def gumbel_argmax(self, logits: Tensor, inv_temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """argmax of logits * inv_temperature + noise(seed, position, id). seeds: int64 or uint64; positions: int64."""
        _rows(logits)
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        assert inv_temperature.shape == seeds.shape == positions.shape == ids.shape
        assert seeds.dtype in (torch.int64, torch.uint64)
        assert seeds.is_contiguous()
        size = logits.stride(0), *logits.shape
        noise = floats(inv_temperature), seeds.data_ptr(), _flat(positions, torch.int64)
        self._c.ss_sample(logits.data_ptr(), *size, *noise, ids.data_ptr(), None)
        return ids

    def log_softmax(self, logits: Tensor) -> Tensor:
        """logits: [S, V] -> log-probabilities [S, V]."""
        _rows(logits)
        out = torch.empty(logits.shape)
        self._c.ss_log_softmax(logits.data_ptr(), logits.stride(0), *logits.shape, floats(out))
        return out

    def probe(self, out: Tensor, repeats: int) -> None:
        """Run trivial jobs of ``len(out)`` chunks: what a call costs, and whether each chunk runs once."""
        self._c.ss_pool_probe(floats(out), out.shape[0], repeats)


def floats(x: Tensor) -> int:
    assert x.dtype == torch.float32, x.dtype
    assert x.is_contiguous(), (x.shape, x.stride())
    return x.data_ptr()


def coded(cache: Tensor) -> bool:
    """Codes, and after those of a block their scales: a block of ``cache`` ends before them. See kv_codes.h."""
    return cache.dtype == torch.uint8


def caches(k_cache: Tensor, v_cache: Tensor) -> tuple[int, int]:
    """Where they lie: floats, or codes."""
    assert k_cache.shape == v_cache.shape
    if not coded(k_cache):
        return floats(k_cache), floats(v_cache)
    _, heads, block_size, dim = k_cache.shape
    strides = (heads * block_size * (dim + 2), block_size * dim, dim, 1)
    for cache in (k_cache, v_cache):
        assert cache.dtype == torch.uint8
        assert all(size == 1 or a == b for size, a, b in zip(cache.shape, cache.stride(), strides, strict=True))
    return k_cache.data_ptr(), v_cache.data_ptr()


def load(num_threads: int | None = None) -> Kernels | str:
    """The kernels for this machine, compiled if need be, or one sentence saying why there are none."""
    built = build()
    return Kernels(built.library, num_threads) if built.library is not None else built.why_not
