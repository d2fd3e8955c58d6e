"""What llama.cpp's converter did to a tensor, undone: the tensor as a Hugging Face folder has it.

A change works on whole rows, so it may be given raw blocks; one that computes with the numbers gives float32. A shape
that does not fit is left as it is: the check of the model's shapes says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from slipstream.load.dequantize import dequantize
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import RawTensor

Shape = tuple[int, ...]


def _same_tensor(raw: RawTensor, spec: ModelSpec) -> RawTensor:
    return raw


def _same_shape(shape: Shape, spec: ModelSpec) -> Shape:
    return shape


@dataclass(frozen=True, slots=True)
class Change:
    tensor: Callable[[RawTensor, ModelSpec], RawTensor] = _same_tensor
    shape: Callable[[Shape, ModelSpec], Shape] = _same_shape
    computes: bool = False  # with the numbers: the tensor becomes float32


AS_STORED = Change()


def half_split_rows(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair, half) of each head, as llama.cpp's rotary kernel reads them, -> rows (half, pair)."""
    # [heads, head_dim / 2, 2, columns or bytes of a row]
    pairs = data.reshape(heads, -1, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


HALF_SPLIT_QUERIES = Change(lambda raw, spec: replace(raw, data=half_split_rows(raw.data, spec.num_heads)))
HALF_SPLIT_KEYS = Change(lambda raw, spec: replace(raw, data=half_split_rows(raw.data, spec.num_kv_heads)))


def _computed(formula: Callable[[np.ndarray], np.ndarray]) -> Change:
    def tensor(raw: RawTensor, spec: ModelSpec) -> RawTensor:
        with np.errstate(all="ignore"):  # a damaged file may hold any number
            return RawTensor(raw.name, "F32", raw.shape, formula(dequantize(raw)))

    return Change(tensor, computes=True)


def _less_one(weight: np.ndarray) -> np.ndarray:
    return weight - np.float32(1)


def _log_of_negative(decay: np.ndarray) -> np.ndarray:
    logarithm: np.ndarray = np.log(-decay)
    return logarithm


LESS_ONE = _computed(_less_one)  # norms: GGUF has 1 + w
LOG_OF_NEGATIVE = _computed(_log_of_negative)  # ssm_a is -exp(A_log)


def _reshaped(shape: Callable[[Shape, ModelSpec], Shape]) -> Change:
    def tensor(raw: RawTensor, spec: ModelSpec) -> RawTensor:
        new = shape(raw.shape, spec)
        blocks = raw.data.dtype == np.uint8
        return replace(raw, shape=new, data=raw.data if blocks else raw.data.reshape(new))

    return Change(tensor, shape)


ONE_ROW = _reshaped(lambda shape, spec: (1, *shape) if len(shape) == 1 else shape)
CONV = _reshaped(lambda shape, spec: (shape[0], 1, shape[1]) if len(shape) == 2 else shape)


def _rows(which: Callable[[ModelSpec], np.ndarray], total: Callable[[ModelSpec], int]) -> Change:
    """Some rows of a matrix that has several in one."""

    def shape(stored: Shape, spec: ModelSpec) -> Shape:
        fits = len(stored) == 2 and stored[0] == total(spec)
        return (len(which(spec)), stored[1]) if fits else stored

    def tensor(raw: RawTensor, spec: ModelSpec) -> RawTensor:
        return raw if shape(raw.shape, spec) == raw.shape else raw.rows(which(spec))

    return Change(tensor, shape)


def _gate_rows(part: int) -> Callable[[ModelSpec], np.ndarray]:
    """Qwen3-Next's b (0) or a (1): each key head has those of its value heads, b before a."""

    def which(spec: ModelSpec) -> np.ndarray:
        gdn = spec.gdn
        assert gdn is not None
        return np.arange(2 * gdn.num_v_heads).reshape(gdn.num_k_heads, 2, -1)[:, part].ravel()

    return which


def _num_gate_rows(spec: ModelSpec) -> int:
    assert spec.gdn is not None
    return 2 * spec.gdn.num_v_heads


BETA_ROWS = _rows(_gate_rows(0), _num_gate_rows)
ALPHA_ROWS = _rows(_gate_rows(1), _num_gate_rows)


def _entry_parts(spec: ModelSpec) -> list[np.ndarray]:
    """q, k, v and z in Qwen3-Next's own matrix of all four: each key head has its share of each."""
    gdn = spec.gdn
    assert gdn is not None
    values = gdn.num_v_heads // gdn.num_k_heads * gdn.v_dim
    sizes = np.cumsum([gdn.k_dim, gdn.k_dim, values])
    # [k heads, rows of one]
    rows = np.arange(_num_entry_rows(spec)).reshape(gdn.num_k_heads, -1)
    return [part.ravel() for part in np.split(rows, sizes, axis=1)]


def _num_entry_rows(spec: ModelSpec) -> int:
    assert spec.gdn is not None
    return spec.gdn.conv_channels + spec.gdn.num_v_heads * spec.gdn.v_dim


def _qkv_rows(spec: ModelSpec) -> np.ndarray:
    return np.concatenate(_entry_parts(spec)[:3])


def _z_rows(spec: ModelSpec) -> np.ndarray:
    return _entry_parts(spec)[3]


QKV_ROWS = _rows(_qkv_rows, _num_entry_rows)
Z_ROWS = _rows(_z_rows, _num_entry_rows)
