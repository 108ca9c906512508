"""Damage to text files and command lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = (
    *("0", "-1", "-0.0", "1e308", "1e-308", "1e309", "-1e308", "NaN", "Infinity", "-Infinity"),
    *("5e-324", "1e60", "1e-60", "1e61", "99999999999", "100000000000000", "1000000000"),
    *("9" * 5000, "0." + "0" * 5000 + "1", "1e99999", "2147483648", "9223372036854775808"),
    *("true", "false", "null", '"1"', "0x10", "01", "1.5"),
)


LARGE = (
    "1_000",
    "10001",
    "65536",
    "100001",
)  # sizes of which some are valid but slow


WORDS = (
    "links",
    "forward",
    "F",
    "B",
    "STEP",
    "@",
    ">",
    "SEND_F",
    "OVERLAP_F_B",
    "stage_id=",
    " -- ",
)


PIECES = (
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    "\n",
    "\r",
    "\t",
    "\0",
    "\ufeff",
    "\ud7ff",
    " ",
    "'",
    "=",
)


# Command lines, damaged word by word.
COMMANDS = (
    ("draw", "1f1b", "-p", "4", "-m", "8", "--forward", "1,1.2,0.9,1", "--transfer", "0.1"),
    (
        "draw",
        "interleaved_1f1b",
        "-p",
        "2",
        "-m",
        "4",
        "--chunks-per-rank",
        "2",
        "--group-size",
        "2",
    ),
    ("draw", "zb_1p", "-p", "3", "-m", "3", "--memory-limit", "22", "--time-budget", "0.01"),
    ("draw", "zb_2p", "-p", "2", "-m", "3", "--memory-limit", "1GiB", "--activation", "1e6"),
    ("simulate", "pipedream", "-p", "4", "-m", "3", "--replicas", "3,1", "--num-minibatches", "4"),
    ("simulate", "gpipe", "zbv", "hanayo", "-p", "3", "-m", "4", "--retained", "0.5"),
    ("run", "--num-processes", "0", "--max-restarts", "1", "nowhere.py"),
    ("verify", "nowhere:build", "1f1b", "--num-ranks", "2", "--num-microbatches", "4"),
    ("profile", "nowhere:build", "--jobs", "1"),
    ("plan", "nowhere:build", "--num-devices", "2", "--memory", "1GiB", "--batch-size", "4"),
)


def damaged(text: str, rng: random.Random) -> bytes:
    """Return the file with one to four faults."""
    data = text.encode("utf-8", errors="surrogatepass")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(FAULTS)(data, rng)
    return data


def flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\0"
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 16))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def remove(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(1, 40) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 8, 64, 512))]
    return data[:start] + piece * rng.choice((2, 3, 50)) + data[start:]


def insert(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = rng.choice((*PIECES, *WORDS, *NUMBERS)).encode("utf-8", errors="surrogatepass")
    return data[:start] + piece * rng.choice((1, 1, 1, 2)) + data[start:]


def other_number(data: bytes, rng: random.Random) -> bytes:
    """Replace a number by an extreme one or by another number of the file."""
    text = data.decode("latin-1")
    places = list(numbers_in(text))
    if not places:
        return data
    first, last = rng.choice(places)
    a, b = rng.choice(places)
    number = rng.choice((*NUMBERS, *LARGE, text[a:b], text[a:b]))
    return (text[:first] + number + text[last:]).encode("latin-1", errors="replace")


def numbers_in(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(text):
        end = position
        while end < len(text) and (text[end].isdigit() or text[end] in ".e-+"):
            end += 1
        if end > position and any(c.isdigit() for c in text[position:end]):
            yield position, end
        position = max(end, position + 1)


def other_word(data: bytes, rng: random.Random) -> bytes:
    words = data.split()
    if not words:
        return data
    return data.replace(rng.choice(words), rng.choice(words), 1)


def lines_in_another_order(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    kept = [line for line in lines if rng.random() > 0.1]
    if rng.random() < 0.5:
        rng.shuffle(kept)
    return b"".join(kept + rng.sample(lines, min(len(lines), rng.randrange(3))))


def deep(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((50, 1000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")")))
    start = rng.randrange(len(data) + 1)
    return data[:start] + opening * depth + b"1" + closing * depth + data[start:]


def other_encoding(data: bytes, rng: random.Random) -> bytes:
    name = rng.choice(("utf-16", "utf-32", "utf-16-le", "latin-1", "cp037", "utf-8-sig", "utf-7"))
    return data.decode("latin-1").encode(name, errors="replace")


def other_json(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove, copy or repeat a value of a JSON file."""
    try:
        value = json.loads(data)
        places = list(places_in(value))
    except (ValueError, RecursionError):
        return other_number(data, rng)
    container, key = rng.choice(places) if places else ([value], 0)
    choice = rng.randrange(5)
    if choice == 0 and isinstance(container, dict):
        del container[key]
    elif choice == 1 and isinstance(container, dict):
        container[rng.choice(("speed", "", "links", "é", "x" * 5000))] = container[key]
    elif choice == 2:
        container[key] = rng.choice(
            (None, True, "", "x", [], {}, [[]], [1], {"a": 1}, -1, 0.5, 10**400)
        )
    elif choice == 3:
        other, name = rng.choice(places) if places else ([value], 0)
        container[key] = json.loads(json.dumps(other[name]))
    else:
        container[key] = [container[key]] * rng.choice((1, 2, 1000))
    return json.dumps(value).encode()


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys."""
    if not isinstance(value, dict | list):
        return
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        yield from places_in(value[key])


def large(data: bytes, rng: random.Random) -> bytes:
    return data * rng.choice((10, 100)) if len(data) < 20_000 else data


FAULTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip, cut, remove, repeat, insert, insert, other_number, other_number, other_word),
    *(lines_in_another_order, deep, other_encoding, other_json, other_json, large),
)


def damaged_command(rng: random.Random) -> list[str]:
    """Return a command line with one to three strange words."""
    words = list(rng.choice(COMMANDS))
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(1, len(words))
        strange = (
            *NUMBERS,
            *WORDS,
            "",
            "all",
            "x" * 5000,
            "é",
            "../x:y",
            "a.csv",
            "--",
            "-1",
            "nan",
        )
        words[place] = rng.choice((*strange, words[place][::-1], words[place] * 3))
        if rng.random() < 0.1:
            del words[place]
            words.append("1")
    return [word.replace("\0", "") for word in words]
