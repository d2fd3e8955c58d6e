"""From codes and scales on the device to the layout that kernels read: see coded.py."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.quant.code_layout import BIAS, TILE, CodeLayout
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix
from slipstream.runners.cuda.kernels.quant.device_codes import DeviceCodes
from slipstream.runners.cuda.kernels.quant.int8 import UNIT


def put(matrix: CodedMatrix, rows: slice, codes: DeviceCodes) -> None:
    """These rows of the matrix."""
    layout = matrix.layout
    tiled = _in_tiles(codes.codes, layout)
    if layout.bits == 8:
        low, high = tiled.view(*tiled.shape[:2], 2, TILE // 2).unbind(2)
        matrix.words[rows] = _words(torch.stack((low, high), dim=-1))
    else:
        matrix.words[rows] = _nibbles(tiled & 15)
    if matrix.high is not None:
        matrix.high[rows] = _plane(tiled >> 4, layout.high_bits)
    if layout.has_factors:
        _put_factors(matrix, rows, codes)
        return
    unit = float(UNIT.value) * layout.table_unit
    matrix.scales[:, rows] = _pairs(_by_group(codes.step, codes.factor, layout, matrix.width) * unit)
    if matrix.minimums is not None:
        assert codes.minimum_step is not None
        minimum = _by_group(codes.minimum_step, codes.minimum_factor, layout, matrix.width)
        matrix.minimums[:, rows] = _pairs(minimum)


def _in_tiles(codes: Tensor, layout: CodeLayout) -> Tensor:
    """Without their sign; the last tile is filled up. uint8 [rows, tiles, TILE]"""
    if codes.dtype == torch.int8:
        codes = (codes.view(torch.uint8) + layout.offset) if layout.offset else codes.view(torch.uint8)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % TILE))
    return padded.view(codes.shape[0], -1, TILE)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes of four bits. uint8 [rows, tiles, TILE] -> int16 [rows, words]"""
    first, second, third, fourth = codes.view(*codes.shape[:2], 4, TILE // 4).unbind(2)
    return _words(torch.stack((first | second << 4, third | fourth << 4), dim=-1))


def _plane(high: Tensor, bits: int) -> Tensor:
    """The high bits of codes. uint8 [rows, tiles, TILE] -> int16 [rows, words]

    Those of one word's four codes make a field; a word of the plane has the fields of words that lie evenly apart.
    """
    first, second, third, fourth = high.view(*high.shape[:2], 4, TILE // 4).unbind(2)
    field = first | second << bits | third << 2 * bits | fourth << 3 * bits  # uint8 [rows, tiles, TILE / 4]
    if bits == 1:
        a, b, c, d = field.view(*field.shape[:2], 4, TILE // 16).unbind(2)
        return _words(torch.stack((a | b << 4, c | d << 4), dim=-1))
    return _words(field.view(*field.shape[:2], 2, TILE // 8).transpose(2, 3))


def _words(low_high: Tensor) -> Tensor:
    """uint8 [rows, tiles, words, 2] -> int16 [rows, words]"""
    return low_high.contiguous().view(torch.int16).flatten(1)


def _put_factors(matrix: CodedMatrix, rows: slice, codes: DeviceCodes) -> None:
    layout = matrix.layout
    assert matrix.steps is not None
    unit = float(UNIT.value)
    if layout.float_factors:
        found = fp8_factors(codes.step)
        assert found is not None, "the scales are not FP8 times one number"
        low, one = found
        low = torch.nn.functional.pad(low, (0, -low.shape[1] % layout.groups))
        steps = [one.expand(low.shape[0], low.shape[1] // layout.groups) * (unit * layout.table_unit)]
    else:
        assert codes.factor is not None
        low = (codes.factor.to(torch.int16) + BIAS).to(torch.uint8)
        steps = [codes.step * (unit * unit * layout.table_unit)]
    if layout.has_minimum:
        assert codes.minimum_step is not None
        assert codes.minimum_factor is not None
        steps.append(codes.minimum_step * unit)
        both = torch.stack((low, codes.minimum_factor + BIAS), dim=-1)
    else:
        both = low.view(low.shape[0], -1, 2)
    matrix.scales[:, rows] = both.contiguous().view(torch.int16).squeeze(-1).T
    matrix.steps[:, rows] = torch.stack(steps, dim=-1).flatten(1).T


def fp8_factors(scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales as FP8 (e4m3) times one number: uint8, and that number; None: they are not, to float32's last bits.

    The largest one may have any mantissa; each is tried.
    """
    top = scales.max()
    for eighths in range(8, 16):
        size = eighths / 8 * 2.0 ** (8 if eighths < 15 else 7)  # 480 would be no number
        one = torch.where(top > 0, top / size, 1.0)
        factors = (scales / one).to(torch.float8_e4m3fn)
        if bool(((factors.float() * one - scales).abs() <= scales * 2.0**-20).all()):
            return factors.view(torch.uint8), one
    return None


def _by_group(step: Tensor, factor: Tensor | None, layout: CodeLayout, width: int) -> Tensor:
    """float32 [rows, groups], those of columns that only fill up the last tile 0."""
    groups = width // layout.group
    wide = step.repeat_interleave(groups // step.shape[1], dim=1)
    if factor is not None:
        wide = wide * factor
    return torch.nn.functional.pad(wide, (0, -groups % layout.groups))


def _pairs(scales: Tensor) -> Tensor:
    """Two bfloat16 that add up to each, the larger one in the low half.

    float32 [rows, groups] -> int32 [groups, rows]
    """
    high = scales.bfloat16()
    low = (scales - high.float()).bfloat16()
    return torch.stack((high, low), dim=-1).view(torch.int32).squeeze(-1).T
