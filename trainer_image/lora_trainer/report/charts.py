"""Curves as inline SVG: no script, no font, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]

_WIDTH, _HEIGHT = 880, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 12, 28
_MOST_POINTS = 700  # more would not be seen


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, corrected for its beginning: the first value is itself.

    Args:
        values: In order.
        weight: Of what was before, in [0, 1).

    References:
        Kingma & Ba 2014, "Adam", section 3 (the correction); checked in tests/unit/test_trainer_report.py.
    """
    mean, share, result = 0.0, 1.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share *= weight
        result.append(mean / (1 - share))
    return result


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Means of equal groups of points, so that at most `most` are left."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, both outside or on the border."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]


def chart(
    title: str,
    raw: Sequence[Point],
    line: Sequence[Point] = (),
    *,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A curve over steps.

    Args:
        title: For people who can't see it.
        raw: Drawn faintly where there is a `line`, clearly where there is none.
        line: The same, smoothed.
        marks: Steps with what happened there.
    """
    raw, line = [p for p in raw if math.isfinite(p[1])], [p for p in line if math.isfinite(p[1])]
    if not raw:
        return "<p>No steps were logged.</p>"
    ordered = sorted(y for _, y in raw)
    edge = len(ordered) // 100  # single peaks would press the rest flat
    inner = [ordered[edge], ordered[-1 - edge], *(y for _, y in line)]
    ys, xs = ticks(min(inner), max(inner), 4), ticks(0, max(x for x, _ in raw), 8)

    def place(point: Point) -> str:
        x = _LEFT + (point[0] - xs[0]) / (xs[-1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)
        share = min(1.02, max(-0.02, (point[1] - ys[0]) / (ys[-1] - ys[0])))
        return f"{x:.1f},{_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">', f"<title>{title}</title>"]
    for y in ys:
        x1, y1 = place((xs[0], y)).split(",")
        parts.append(f'<line class="grid" x1="{x1}" x2="{_WIDTH - _RIGHT}" y1="{y1}" y2="{y1}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{float(y1) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    below = f'y="{_HEIGHT - 8}" text-anchor="middle"'
    parts += [f'<text x="{place((x, ys[0])).split(",")[0]}" {below}>{x:g}</text>' for x in xs]
    for x, text in marks:
        at = place((x, ys[0])).split(",")[0]
        parts.append(
            f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"><title>{text}</title></line>'
        )
    for kind, points in (("raw" if line else "smooth", raw), ("smooth", line)):
        if points:
            joined = " ".join(place(point) for point in thinned(points))
            parts.append(f'<polyline class="{kind}" points="{joined}"/>')
    return "".join([*parts, "</svg>"])
