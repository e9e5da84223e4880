"""Curves of several ways as a picture."""

from __future__ import annotations

COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def picture(title: str, curves: dict[str, list[tuple[float, float]]], across: str, up: str) -> str:
    """Returns an SVG of lines on white.

    Args:
        title: for those who cannot see it.
        curves: points (x, y) by name.
        across: what x is.
        up: what y is.
    """
    width, height, left, top = 640, 360, 60, 20
    xs, ys = ([point[axis] for points in curves.values() for point in points] for axis in (0, 1))
    most_x, least, most = max(xs), min(ys), max(ys)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 150} {height + 60}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{width + 150}" height="{height + 60}" fill="white"/>',
    ]
    for part in range(5):
        y = top + height - 20 - (height - 40) * part / 4
        lines.append(
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{least + (most - least) * part / 4:.2f}</text>'
        )
        lines.append(f'<line x1="{left}" x2="{width}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        x = left + (width - left) * part / 4
        lines.append(f'<text x="{x}" y="{top + height}" text-anchor="middle">{most_x * part / 4:g}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = []
        for x, y in points:
            down = top + height - 20 - (height - 40) * (y - least) / (most - least)
            placed.append(f"{left + (width - left) * x / most_x:.1f},{down:.1f}")
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(placed)}"/>')
        lines.append(f'<text x="{width + 10}" y="{40 + 18 * number}" fill="{colour}">{name}</text>')
    lines.append(f'<text x="{width / 2}" y="{height + 45}" text-anchor="middle">{across}</text>')
    lines.append(f'<text x="{left}" y="{top - 6}">{up}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
