"""Numbers and words without quotes, as models write them in JSON, JavaScript or Python, and their JSON."""

from __future__ import annotations

import json
import re
from contextlib import suppress

MAX_DIGITS = 4300  # digits of a number that Python's json reads; a longer one is written as a string
_LONGEST_NUMBER = 400  # characters of a number in another notation than JSON's
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_BASED = re.compile(r"0[xob][0-9a-f_]+", re.ASCII | re.IGNORECASE)
_DECIMAL = re.compile(r"(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WORDS = {
    **dict.fromkeys(("true", "True", "TRUE"), "true"),
    **dict.fromkeys(("false", "False", "FALSE"), "false"),
    **dict.fromkeys(("null", "None", "NULL", "undefined"), "null"),
    **dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "null"),
}
_HALVES = re.compile("[\ud800-\udfff]")


def inner(text: str) -> str:
    """Return a text as it stands in a JSON string. Halves of surrogate pairs are replaced."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    return written if written.isascii() else _HALVES.sub("\ufffd", written)


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return f'"{inner(text)}"'


def is_number(text: str) -> bool:
    """Return True if a text is a number of JSON that parsers read."""
    return len(text) <= MAX_DIGITS and _NUMBER.fullmatch(text) is not None


def scalar(text: str, *, key: bool) -> str:
    """Return the JSON of a number or a word of JSON, JavaScript or Python; a string for any other text.

    key: it is the key of an object, so it is written as a string.
    """
    number = _number(text)
    if key:
        return f'"{inner(text)}"' if number is None else f'"{number.strip(chr(34))}"'
    return number or _WORDS.get(text) or quoted(text)


def _number(text: str) -> str | None:
    """Return a number's JSON; None if the text is not a number."""
    if _NUMBER.fullmatch(text):
        return text if len(text) <= MAX_DIGITS else f'"{text}"'
    digits = text[text[:1] in ("-", "+") :].lstrip()
    if len(digits) > _LONGEST_NUMBER:
        return None
    sign = "-" if text.startswith("-") else ""
    with suppress(ValueError, OverflowError):
        if _BASED.fullmatch(digits):
            return sign + str(int(digits, 0))
        if _DECIMAL.fullmatch(digits) and digits.replace("_", "").isdigit():
            return sign + str(int(digits))
        if _DECIMAL.fullmatch(digits):
            number = float(sign + digits)
            return json.dumps(int(number) if number.is_integer() else number, allow_nan=False)
    return None
