"""Pages are escaped, self-contained and legible on a phone; axes have round labels."""

from __future__ import annotations

import random
import re

import pytest

from ridgeline.report import svg
from ridgeline.report.distribution_chart import distribution_figure
from ridgeline.report.html import HtmlTable, Tile, render_page
from ridgeline.report.result import Result
from ridgeline.report.roofline_chart import Mark, roofline_figure
from ridgeline.report.svg import NARROW, WIDE, Scale, log_ticks, nice_ticks
from ridgeline.roofline import Peaks, RooflinePoint

PEAKS = Peaks(flops_s=1e11, bytes_s=2e10, dtype="float32", source="a test")


class Greeting(Result, frozen=True, kw_only=True):
    text: str


def test_record_page_escapes_and_fetches_nothing() -> None:
    page = Greeting(text="<script>alert(1)</script>").to_html()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "http" not in page and "url(" not in page
    assert '<meta name="viewport"' in page


def test_missing_values_are_errors_not_blanks() -> None:
    with pytest.raises(Exception, match="undefined"):
        render_page("report/record.html", title="x", eyebrow="", heading="", lede="")


def test_macros_render_tables_tiles_and_sections() -> None:
    from ridgeline.report.html import _environment

    source = (
        '{% from "report/macros.html" import section, table, tiles %}'
        '{{ section("Empty", "<b>") }}{{ tiles(items) }}{{ table(data) }}'
    )
    page = (
        _environment()
        .from_string(source)
        .render(
            items=[Tile("speed", "1", "tok/s", "was 2")],
            data=HtmlTable(columns=("", "n"), rows=[("a&b", "3")]),
        )
    )
    assert "<h2>Empty</h2>" in page and "&lt;b&gt;" in page
    assert "1 <small>tok/s</small>" in page
    assert "<td>a&amp;b</td>" in page and '<td class="num">3</td>' in page


def test_figures_are_drawn_for_wide_and_narrow_screens() -> None:
    points = [
        RooflinePoint(
            name="decode",
            phase="decode",
            intensity=1.0,
            achieved_flops_s=1e9,
            achieved_bytes_s=1e9,
            roof_flops_s=2e10,
            time_s=1.0,
            num_steps=1,
        )
    ] * 40
    figure = roofline_figure([Mark("B", "before", point) for point in points], PEAKS, "roofline")
    for width in (WIDE, NARROW):
        assert f'viewBox="0 0 {width} ' in figure
    assert figure.count('class="figure wide"') == figure.count('class="figure narrow"') == 1
    assert svg.figure(lambda width: svg.Markup()) == ""


def test_marks_that_would_hide_each_other_stay_inside_the_chart() -> None:
    from ridgeline.report.roofline_chart import TOO_NEAR, _spread

    shown = [place for _, place in _spread([(300.0, 50.0)] * 12, right=320.0)]
    assert len(set(shown)) == 12 and max(x for x, _ in shown) <= 320.0
    nearest = min(
        ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5
        for i, a in enumerate(shown)
        for b in shown[:i]
    )
    assert nearest >= TOO_NEAR - 1e-9


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_names_of_roofs_hide_no_mark_and_no_other_name(width: int) -> None:
    """Marks of a decode phase lie right below the bandwidth roof, where its name used to stand."""
    from ridgeline.report.roofline_chart import Box, _roof_labels, _scales

    peaks = Peaks(
        flops_s=5e11,
        bytes_s=6e10,
        dtype="float32",
        source="a test",
        flops_s_by_dtype={"bfloat16": 6e11, "int8": 2e12},
    )
    rng = random.Random(0)
    for _ in range(100):
        speeds = [(rng.uniform(1, 400), rng.uniform(0.2, 1.0)) for _ in range(8)]
        points = [
            RooflinePoint(
                name="a phase",
                phase="decode",
                intensity=intensity,
                achieved_flops_s=share * min(5e11, 6e10 * intensity),
                achieved_bytes_s=1e9,
                roof_flops_s=5e11,
                time_s=1.0,
                num_steps=1,
            )
            for intensity, share in speeds
        ]
        x, y = _scales(width, points, peaks)
        marks = [(x(point.intensity), y(point.achieved_flops_s / 1e9)) for point in points]
        labels = []
        for text in _roof_labels(x, y, peaks, marks):
            found = re.search(r'x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">(.*)</text>', text)
            assert found is not None, text
            at = float(found[1]), float(found[2])
            labels.append(Box.of_text(found[4], at, found[3]))
        for number, box in enumerate(labels):
            assert box.left >= 0 and box.right <= width
            hidden = [mark for mark in marks if box.overlaps(Box(*mark, *mark))]
            assert not hidden and not any(map(box.overlaps, labels[:number]))


def test_distribution_has_a_log_axis_only_for_a_wide_range() -> None:
    assert distribution_figure("TTFT", (), (), 0.1) == ""
    assert "log scale" in distribution_figure("TTFT", (0.001,), (0.1, 1.0), None)
    narrow = distribution_figure("TTFT", (), (0.1, 0.2), 0.15)
    assert "log scale" not in narrow and "SLO 150 ms" in narrow


def test_ticks_are_round_and_inside_the_axis() -> None:
    assert nice_ticks(0, 10) == (0, 2, 4, 6, 8, 10)
    assert nice_ticks(0, 0.33) == pytest.approx((0, 0.1, 0.2, 0.3))
    assert log_ticks(0.5, 50) == pytest.approx((0.5, 1, 2, 5, 10, 20, 50))
    assert log_ticks(1, 1e5) == pytest.approx((1, 10, 100, 1000, 1e4, 1e5))


def test_short_axes_have_fewer_ticks() -> None:
    long, short = (Scale(low=1, high=999, start=0, end=end, log=True) for end in (900, 150))
    assert len(long.ticks()) > len(short.ticks()) >= 2


def test_scale_maps_its_ends_and_clips_beyond_them() -> None:
    scale = Scale(low=1, high=100, start=0, end=200, log=True)
    assert scale(10) == pytest.approx(100)
    assert scale(1e9) <= 204
