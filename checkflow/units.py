"""Sizes, rates and times as people write them, to and from integers. GB is 1e9, GiB is 2^30."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction
from numbers import Real

from checkflow.errors import InputError, shown

_SCALES = {"": 1} | {
    prefix + infix: base**power
    for power, prefix in enumerate("kMGTP", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_NUMBER = r"(?P<digits>[0-9]+(?:\.[0-9]+)?)"  # no other script's digits
_EXPONENT = r"(?:[eE](?P<exponent>[+-]?[0-9]+))?"
_QUANTITY = re.compile(rf"\s*{_NUMBER}{_EXPONENT}\s*(?P<scale>(?:[kKMGTP]i?)?)B?(?P<per>/s)?\s*")
MOST = 10**24  # of any unit here: a yottabyte, or 30 million years; what is made of it fits a float
_MOST_DIGITS, _MOST_OF_EXPONENT = 50, 4
_MOST_WAITED_S = 2_000_000  # the system counts in milliseconds, and 31 bits


def parse_bytes(text: str, what: str = "size") -> int:
    """ "4MiB" -> 4194304. Raises InputError unless it is a positive size; a bare number is bytes."""
    return _parse(text, what, rate=False)


def parse_rate(text: str, what: str = "bandwidth") -> int:
    """ "63GB/s" -> 63000000000 (bytes per second). Raises InputError unless it is a positive rate."""
    return _parse(text, what, rate=True)


def _parse(text: str, what: str, *, rate: bool) -> int:
    example = "63GB/s" if rate else "16MiB"
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["per"] and not rate):
        raise InputError(f"{what}: {text!r} is not a {'rate' if rate else 'size'}; write it like {example}")
    scale = match["scale"].replace("K", "k")
    value = _scaled(match["digits"], match["exponent"] or "0", _SCALES[scale])
    if value is None:
        raise InputError(f"{what}: {text!r} is out of range; write it like {example}")
    if value <= 0:
        raise InputError(f"{what}: {text!r} is not positive; write it like {example}")
    return value


def _scaled(digits: str, exponent: str, scale: int) -> int | None:
    """None for what nobody means, before a number of a million digits is made."""
    if len(digits) > _MOST_DIGITS or len(exponent) > _MOST_OF_EXPONENT:
        return None
    value = int(Fraction(f"{digits}e{exponent}") * scale)
    return value if value <= MOST else None


def fraction_ppm(value: float, what: str) -> int:
    """A fraction in [0, 1) in millionths. Raises InputError otherwise, and for what is none but rounds to 0 or 1."""
    if not 0 <= value < 1:
        raise InputError(f"{what} {value}: is not in [0, 1); 0.1 tolerates 10% drift")
    millionths = round(value * 1_000_000)
    if millionths == 1_000_000 or (value and not millionths):
        raise InputError(
            f"{what} {value}: is not in [0.000001, 0.999999], as millionths are counted; give one of these, or 0"
        )
    return millionths


def whole_number(value: object, what: str, advice: str) -> int:
    """An argument that counts something, NumPy's numbers and 1e3 too. Raises InputError for what is no whole number,
    and for more than there is of anything: what reads it next may have no number of so many digits.

    True is none either: who gives it means something else.
    """
    if isinstance(value, bool):
        raise InputError(f"{what}: {value} is no whole number; {advice}")
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{what}: {shown(value)} is no whole number; {advice}") from None
    if abs(number) > MOST:
        raise InputError(f"{what}: {shown(value)} is out of range; {advice}")
    return number


def real_number(value: object, what: str, advice: str) -> float:
    """An argument that measures something, as a float: fractions and NumPy's numbers too. Infinity is one. Raises
    InputError for what is none, and for what is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{what}: {shown(value)} is no number; {advice}")
    try:
        number = float(value)
    except OverflowError:
        raise InputError(f"{what}: {shown(value)} is out of range; {advice}") from None
    if math.isnan(number):
        raise InputError(f"{what}: {shown(value)} is no number; {advice}")
    return number


def seconds_to_wait(value: object, what: str, advice: str) -> float:
    """An argument that somebody waits for so long. Raises InputError for no time, and for more than can be waited."""
    seconds = real_number(value, what, advice)
    if seconds > _MOST_WAITED_S:
        raise InputError(f"{what}: {shown(value)} is more than {_MOST_WAITED_S} seconds, 23 days; give less")
    return seconds


def format_bytes(size_bytes: int) -> str:
    """1536 -> "1.50 KiB"."""
    return _format(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def size_and_excess(size_bytes: int, limit_bytes: int) -> str:
    """ "1.46 KiB, 96 B over the limit": two figures in units could read the same."""
    return f"{format_bytes(size_bytes)}, {format_bytes(size_bytes - limit_bytes)} over the limit"


def format_rate(bytes_per_s: int) -> str:
    """63000000000 -> "63.0 GB/s"."""
    return _format(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_ns(time_ns: int) -> str:
    """7800000 -> "7.80 ms"."""
    return _format(time_ns, 1000, ("ns", "us", "ms", "s"))


def _format(value: int, base: int, suffixes: tuple[str, ...]) -> str:
    power, scaled = 0, float(value)
    while abs(scaled) >= base and power < len(suffixes) - 1:
        power, scaled = power + 1, scaled / base
    if power == 0:
        return f"{value} {suffixes[0]}"
    return f"{scaled:.{max(0, 3 - len(str(int(abs(scaled)))))}f} {suffixes[power]}"


_TIMES_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}
_SPAN = re.compile(rf"\s*{_NUMBER}{_EXPONENT}\s*(?P<unit>{'|'.join(_TIMES_NS)})\s*")


def parse_ns(text: str, what: str = "time") -> int:
    """ "3h" -> 10800000000000. Raises InputError unless it is a time with its unit; "0s" is one."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise InputError(f"{what}: {text!r} is not a time; write it like 3h, 20min, 30s or 445ms")
    value = _scaled(match["digits"], match["exponent"] or "0", _TIMES_NS[match["unit"]])
    if value is None:
        raise InputError(f"{what}: {text!r} is out of range; write it like 3h, 20min, 30s or 445ms")
    return value
