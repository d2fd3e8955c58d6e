"""Types of command-line arguments: text -> value, or a sentence for argparse to show."""

from __future__ import annotations

import argparse
import re

from slipstream.errors import ConfigError
from slipstream.sampling import MAX_DEPTH, DraftSetting, check_draft

UNITS = ("", "K", "M", "G", "T")
SIZE = re.compile(r"([-+]?\d+(?:\.\d*)?|\.\d+) *(?:([KMGT])(i?))?B?", re.IGNORECASE)


def draft_setting(text: str) -> DraftSetting:
    try:
        return check_draft(int(text) if text.lstrip("-").isdigit() else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def draft_settings(text: str) -> list[DraftSetting]:
    return [draft_setting(part) for part in text.split(",")]


def numbers(text: str, minimum: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between, not {text!r}") from error
    if min(numbers) < minimum:
        raise argparse.ArgumentTypeError(f"must be at least {minimum}")
    return numbers


def depths(text: str) -> list[int]:
    found = numbers(text, 0)
    if max(found) > MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_DEPTH}")
    return found


def num_bytes(text: str) -> int:
    """2GB and 2G are 2 * 10**9, 2GiB is 2 * 2**30."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"a size such as 500MB, 2G or 1.5GiB, not {text!r}")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** UNITS.index((unit or "").upper()))


def rates(text: str) -> tuple[float, ...]:
    """Numbers with commas between."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"numbers with commas between, not {text!r}") from error


def span(text: str) -> tuple[int, int]:
    """One number, or minimum and maximum with a hyphen between."""
    low, _, high = text.partition("-")
    try:
        minimum, maximum = int(low), int(high or low)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a whole number or a range such as 64-256, not {text!r}") from error
    if not 1 <= minimum <= maximum:
        raise argparse.ArgumentTypeError(f"a range from at least 1 up, not {text!r}")
    return minimum, maximum


def targets(text: str) -> dict[str, tuple[str, ...]]:
    """Addresses by name: one=http://host:1+http://host:2,two=http://host:3"""
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name: tuple(urls.split("+")) for name, _, urls in pairs}
    if len(found) < len(pairs) or not all(url.startswith("http://") for urls in found.values() for url in urls):
        raise argparse.ArgumentTypeError(f"name=http://host:port with commas between, not {text!r}")
    return found
