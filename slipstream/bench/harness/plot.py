"""A small line chart as SVG text: a few series over a logarithmic axis, readable on any background."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, TOP, BOTTOM = 80, 150, 74, 58  # margins
COLOURS = ("#1a1a1a", "#c1121f", "#2a6f97", "#e09f3e", "#588157", "#7b2cbf", "#9c6644", "#0a9396")
NUM_TICKS = 6


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    bold: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    subtitle: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    # Derived: where the axes end.
    x_range: tuple[float, float] = field(init=False)
    y_top: float = field(init=False)

    def __post_init__(self) -> None:
        assert any(series.points for series in self.series)
        xs = [x for series in self.series for x, _ in series.points]
        assert min(xs) > 0, "the axis is logarithmic"
        object.__setattr__(self, "x_range", (min(xs), max(xs) if max(xs) > min(xs) else 2 * min(xs)))
        object.__setattr__(self, "y_top", nice_top(max(y for series in self.series for _, y in series.points)))

    def point(self, x: float, y: float) -> tuple[float, float]:
        low, high = map(math.log, self.x_range)
        across = (math.log(x) - low) / (high - low)
        wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + across * wide, 1), round(TOP + (1 - y / self.y_top) * tall, 1)

    def svg(self) -> str:
        parts = [*_frame(self), *_x_axis(self), *_y_axis(self)]
        for index, series in enumerate(self.series):
            parts += _line(self, series, COLOURS[index % len(COLOURS)], index)
        box = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif">\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )

    def write(self, path: str) -> None:
        Path(path).write_text(self.svg())


def nice_top(value: float) -> float:
    """The end of an axis that holds ``value`` and divides into NUM_TICKS - 1 round steps."""
    step = max(value, 1e-9) / (NUM_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(step))
    return (NUM_TICKS - 1) * next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= step * (1 - 1e-9))


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="13" fill="#333" {more}>{escape(text)}</text>'


def _frame(chart: Chart) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fdfdfb"/>',
        f'<text x="{LEFT}" y="30" font-size="17" font-weight="bold" fill="#1a1a1a">{escape(chart.title)}</text>',
        _text(LEFT, 52, chart.subtitle),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, chart.x_label, 'text-anchor="middle"'),
        _text(22, middle, chart.y_label, f'text-anchor="middle" transform="rotate(-90 22 {middle})"'),
    ]


def _x_axis(chart: Chart) -> list[str]:
    parts = []
    for x in sorted({x for series in chart.series for x, _ in series.points}):
        at, bottom = chart.point(x, 0)
        parts.append(f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{bottom}" stroke="#eee"/>')
        parts.append(_text(at, bottom + 20, f"{x:g}", 'text-anchor="middle"'))
    return parts


def _y_axis(chart: Chart) -> list[str]:
    parts = []
    for i in range(NUM_TICKS):
        value = chart.y_top * i / (NUM_TICKS - 1)
        left, at = chart.point(chart.x_range[0], value)
        parts.append(f'<line x1="{left}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}" stroke="#ddd"/>')
        parts.append(_text(left - 8, at + 4, f"{value:g}", 'text-anchor="end"'))
    return parts


def _line(chart: Chart, series: Series, colour: str, index: int) -> list[str]:
    points = [chart.point(x, y) for x, y in sorted(series.points)]
    path = " ".join(f"{x},{y}" for x, y in points)
    stroke = f'stroke="{colour}" stroke-width="{3 if series.bold else 1.7}"'
    stroke += ' stroke-dasharray="6 4"' if series.dashed else ""
    legend_x, legend_y = WIDTH - RIGHT + 16, TOP + 12 + 22 * index
    weight = 'font-weight="bold"' if series.bold else ""
    return [
        f'<polyline points="{path}" fill="none" {stroke}/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points),
        f'<line x1="{legend_x}" y1="{legend_y}" x2="{legend_x + 22}" y2="{legend_y}" {stroke}/>',
        _text(legend_x + 30, legend_y + 4, series.name, weight),
    ]
