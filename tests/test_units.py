"""Sizes, rates and times as people write them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.errors import InputError
from checkflow.units import (
    MOST,
    format_bytes,
    format_ns,
    format_rate,
    fraction_ppm,
    parse_bytes,
    parse_ns,
    parse_rate,
    real_number,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1B", 1),
        ("4MiB", 4 << 20),
        ("4Mi", 4 << 20),
        ("4M", 4_000_000),
        ("16 kB", 16_000),
        ("16KB", 16_000),
        ("16KiB", 16 << 10),
        ("1.5GiB", 3 << 29),
        ("0.1 GB", 100_000_000),
        ("1e3", 1000),
        ("1.5e-3 GB", 1_500_000),
        (" 2TiB ", 2 << 40),
        ("1PB", 10**15),
    ],
)
def test_size_is_parsed_exactly(text: str, size: int) -> None:
    """GB is 1e9 and GiB is 2^30, without a detour through floats."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [("63GB/s", 63 * 10**9), ("63 GB", 63 * 10**9), ("31.5GB/s", 31_500_000_000), ("1GiB/s", 1 << 30), ("8/s", 8)],
)
def test_rate_is_parsed_exactly(text: str, rate: int) -> None:
    """The "/s" may be left out."""
    assert parse_rate(text) == rate


NONSENSE = [
    "", " ", "fast", "GB", "4 apples", "4MiBs", "4Mi B x", "-4MB", "+4MB", "0", "0.2", "0GB", "nan", "inf", "1e",
    ".5GB", "1,5GB", "1_000", "4mib", "4gb", "1GB/h", "1GB/ms", "1 / 2", "0x10", "4XB",
]  # fmt: skip


@pytest.mark.parametrize("text", [*NONSENSE, "4MB/s"])
def test_nonsense_for_a_size_is_one_line(text: str) -> None:
    """The line names the option, repeats what was given and shows how to write it."""
    with pytest.raises(InputError, match=r"^--chunk: .* write it like 16MiB$") as raised:
        parse_bytes(text, "--chunk")
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_for_a_rate_is_one_line(text: str) -> None:
    """The same for rates."""
    with pytest.raises(InputError, match=r"^bandwidth: .* write it like 63GB/s$"):
        parse_rate(text)


OUT_OF_RANGE = ["9" * 25, "9" * 400, "9" * 5000, "1e400", "1e-99999", "1e999999999", "1000000001PB"]


@pytest.mark.parametrize("text", OUT_OF_RANGE)
def test_what_nobody_means_is_out_of_range(text: str) -> None:
    """At once, however large."""
    with pytest.raises(InputError, match=r"^bandwidth: .*is out of range; write it like 63GB/s$"):
        parse_rate(text)
    with pytest.raises(InputError, match=r"^size: "):
        parse_bytes(text)
    with pytest.raises(InputError, match=r"^time: "):
        parse_ns(text + "h")
    assert parse_ns("1.5e3s") == 1500 * 10**9
    assert parse_bytes(str(MOST)) == parse_rate("1e24") == parse_ns(f"{MOST}ns") == MOST
    with pytest.raises(InputError):
        parse_bytes(str(MOST + 1))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (4 << 20, "4.00 MiB"),
        (16 << 20, "16.0 MiB"),
        (999 << 20, "999 MiB"),
        (603 << 20, "603 MiB"),
        (96_000_000_000, "89.4 GiB"),
        (1 << 60, "1048576 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_size_is_written_with_three_digits(size: int, text: str) -> None:
    """Powers of 1024, as sizes of memory are meant."""
    assert format_bytes(size) == text


@pytest.mark.parametrize("value", [-0.1, 1.0, 0.9999999, 1e-9, float("nan")])
def test_what_is_no_fraction_is_shown_as_it_was_given(value: float) -> None:
    with pytest.raises(InputError, match=rf"--slack {value}: is not in"):
        fraction_ppm(value, "--slack")
    assert [fraction_ppm(each, "--slack") for each in (0.0, 0.000001, 0.999999)] == [0, 1, 999_999]


def test_rates_and_times_are_written_with_three_digits() -> None:
    """Powers of 1000."""
    assert format_rate(63_000_000_000) == "63.0 GB/s"
    assert format_rate(7) == "7 B/s"
    assert format_ns(7_800_000) == "7.80 ms"
    assert format_ns(950) == "950 ns"
    assert format_ns(3_600 * 10**9) == "3600 s"


@given(st.integers(1, 10**15))
def test_number_without_a_unit_is_itself(size: int) -> None:
    """Bare numbers are bytes."""
    assert parse_bytes(str(size)) == parse_rate(f"{size}B/s") == size


@given(st.integers(1, 10**15))
def test_what_is_written_can_be_parsed_again(size: int) -> None:
    """A formatted size reads back to within its three digits."""
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)
    assert parse_rate(format_rate(size)) == pytest.approx(size, rel=0.006)


def test_true_is_no_number_that_counts() -> None:
    """`restore(True)` would restore iteration 1."""
    assert whole_number(1e3, "restore: iteration", "give one") == 1000
    with pytest.raises(InputError, match=r"^restore: iteration: True is no whole number; give one$"):
        whole_number(True, "restore: iteration", "give one")


def test_what_counts_has_an_end() -> None:
    """JSON's reader has no number of more than 4300 digits, and Python shows none."""
    assert whole_number(MOST, "retention: last", "give how many") == MOST
    for value in (10**5000, -(10**5000), 10**30, 1e300):
        with pytest.raises(InputError, match=r"^retention: last: .{1,110} is out of range; give how many$"):
            whole_number(value, "retention: last", "give how many")


def test_seconds_are_a_float() -> None:
    for value in (Fraction(1, 2), np.float32(0.5), 0.5):
        seconds = real_number(value, "retry_s", "use 0 or more")
        assert type(seconds) is float and seconds == 0.5
    assert real_number(np.int64(3), "retry_s", "use 0 or more") == 3
    assert real_number(float("inf"), "retry_s", "use 0 or more") == float("inf")
    for value in (10**400, 10**5000, Fraction(10**400, 3)):
        with pytest.raises(InputError, match=r"^retry_s: .{1,110} is out of range; use 0 or more$"):
            real_number(value, "retry_s", "use 0 or more")
    for none in (True, "5", float("nan"), None, 1j):
        with pytest.raises(InputError, match=r"^retry_s: .* is no number; use 0 or more$"):
            real_number(none, "retry_s", "use 0 or more")
