"""Types of command-line arguments: text -> value, or a sentence for argparse to show."""

from __future__ import annotations

import argparse

from slipstream.errors import ConfigError
from slipstream.sampling import MAX_DEPTH, DraftSetting, check_draft


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
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"a size such as 500M or 2G, not {text!r}") from error


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
