"""Byte counts are read as people mean them, and refused with the text that was wrong."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptm_accel.errors import ConfigError
from ptm_accel.units import (
    ACCEPTED_FORMS,
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_decimal,
    format_least,
    format_least_decimal,
    format_most,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("10GB", 10**10),
        ("10 gb", 10**10),
        ("2kB", 2000),
        ("3MB", 3 * 10**6),
        ("1TB", 10**12),
        ("512MiB", 512 * MIB),
        (" 1.5GiB ", 3 * GIB // 2),
        ("0.1GB", 10**8),
        ("64KiB", 64 * KIB),
        ("2TiB", 2 * TIB),
        ("1.0001B", 1),
    ],
)
def test_parse_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("80%", 800), ("100%", 1000), ("0%", 0), ("12.5 %", 125), ("0.19%", 1)])
def test_parse_shares(text: str, nbytes: int) -> None:
    assert parse_bytes(text, total_bytes=1000) == nbytes


def test_total_does_not_change_sizes() -> None:
    assert parse_bytes("1kB", total_bytes=10) == 1000


@pytest.mark.parametrize("value", ["", "GB", "ten", "-3", "1e9", "1,5GB", "10GB!", "1_000", True, 1.5, None, b"1", "٣"])
def test_refuses_what_is_no_size(value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{value!r} is not a byte count; use {ACCEPTED_FORMS}.")):
        parse_bytes(value)  # type: ignore[arg-type]


def test_refuses_negative_int() -> None:
    with pytest.raises(ConfigError, match=r"^-1 is not a byte count; use a whole number of bytes"):
        parse_bytes(-1)


def test_refuses_unknown_unit() -> None:
    with pytest.raises(ConfigError, match=r"'10XB' is not a byte count; use .*\"10GB\""):
        parse_bytes("10XB")


def test_refuses_share_without_total() -> None:
    with pytest.raises(ConfigError, match="'80%' is a share, and here there is no total to take it of; use a size"):
        parse_bytes("80%")


def test_refuses_share_above_the_whole() -> None:
    with pytest.raises(ConfigError, match="'100.5%' is more than the whole; use at most \"100%\"."):
        parse_bytes("100.5%", total_bytes=1000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (4096, "4096 B"),
        (64 * KIB - 1, "65535 B"),
        (64 * KIB, "64.00 KiB"),
        (4 * MIB, "4.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (5 * TIB, "5.00 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=0, max_value=1 << 60))
def test_shown_sizes_are_read_back_within_the_last_digit(nbytes: int) -> None:
    text = format_bytes(nbytes)
    unit = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}[text.split()[1]]
    assert abs(parse_bytes(text) - nbytes) <= 0.0051 * unit + 1


@given(st.integers(min_value=0, max_value=1 << 62))
def test_the_least_and_the_most_of_an_option_work_as_they_are_shown(nbytes: int) -> None:
    least, most = parse_bytes(format_least(nbytes)), parse_bytes(format_most(nbytes))
    assert nbytes <= least <= nbytes * 1.01
    assert nbytes * 0.99 <= most <= nbytes
    assert " " not in format_least(nbytes), "a shell would cut it there"


@pytest.mark.parametrize(
    ("nbytes", "least", "most"),
    [
        (0, "0B", "0B"),
        (4097, "4097B", "4097B"),
        (64 * MIB, "64MiB", "64MiB"),
        (22_639_412, "21.6MiB", "21.59MiB"),
        (100 * MIB + 1, "100.01MiB", "100MiB"),
        (3 * GIB // 2, "1.5GiB", "1.5GiB"),
        (GIB - 1, "1024MiB", "1023.99MiB"),
        (5 * TIB + 1, "5.01TiB", "5TiB"),
    ],
)
def test_figures_to_paste(nbytes: int, least: str, most: str) -> None:
    assert (format_least(nbytes), format_most(nbytes)) == (least, most)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (2.5e-6, "2.5 us"),
        (0.0123, "12 ms"),
        (0.999, "999 ms"),
        (0.99996, "1 s"),
        (3.21, "3.2 s"),
        (9.97, "10 s"),
        (119.0, "119 s"),
        (2590.0, "43 min"),
        (9000.0, "2.5 h"),
        (36 * 3600.0, "36 h"),
        (216000.0, "2.5 days"),
        (1e9, "11574 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(min_value=1, max_value=10**15))
def test_a_least_size_that_is_shown_is_enough(nbytes: int) -> None:
    shown = parse_bytes(format_least_decimal(nbytes))
    assert nbytes <= shown <= nbytes * 1.011 + 1


@pytest.mark.parametrize(
    ("nbytes", "least", "decimal"),
    [
        (999, "999B", "999 B"),
        (22_639_412, "22.7MB", "22.6 MB"),
        (24 * 10**9, "24GB", "24.0 GB"),
        (999_600_000_000, "1000GB", "1.00 TB"),
        (1_540_000_000_000, "1.54TB", "1.54 TB"),
        (0, "0B", "0 B"),
    ],
)
def test_decimal_sizes(nbytes: int, least: str, decimal: str) -> None:
    assert (format_least_decimal(nbytes), format_decimal(nbytes)) == (least, decimal)
