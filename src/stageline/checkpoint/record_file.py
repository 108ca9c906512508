"""Read and write checkpoint.json, whose first line has its length and checksum.

{"stageline_checkpoint": 2, "bytes": 4711, "crc32": 1234567890,
 "number": 1,
 …
"""

from __future__ import annotations

import json
import re
import stat
import zlib
from pathlib import Path
from typing import Any

from stageline.errors import CheckpointError

RECORD = "checkpoint.json"
FORMAT = 2
# The first line always has the same length; the checksum covers everything after it. So neither a
# damaged length nor damaged text is used before it is verified.
HEADER = '{{"stageline_checkpoint": {}, "bytes": {}, "crc32": {},'
HEADER_BYTES = 80
HEADER_FIELDS = ("stageline_checkpoint", "bytes", "crc32")
HEADER_PATTERN = re.compile(
    HEADER.format(r"(\d{1,9})", r"(\d{1,15})", r"(\d{1,10})").replace("{", r"\{", 1) + r" *\n"
)
FIRST_FORMAT = re.compile(r'\{\s*"stageline_checkpoint": 1,')


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the fields of a checkpoint's record after its checksum was verified."""
    path = checkpoint / RECORD
    try:
        fields = json.loads(_verified_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    assert isinstance(fields, dict)  # the first line begins with a brace
    return {name: value for name, value in fields.items() if name not in HEADER_FIELDS}


def record_text(fields: dict[str, Any]) -> bytes:
    """Return the contents of a checkpoint.json, with length and checksum."""
    body = json.dumps(fields, indent=1).removeprefix("{").encode()
    header = HEADER.format(FORMAT, HEADER_BYTES + len(body), zlib.crc32(body))
    return f"{header:<{HEADER_BYTES - 1}}\n".encode() + body


def _verified_text(path: Path) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a named pipe would block until somebody writes
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        text = head.decode("ascii", "replace")
        header = HEADER_PATTERN.fullmatch(text)
        if header is None and FIRST_FORMAT.match(text):
            _check_format(1)
        if header is None:
            raise ValueError("it is damaged or was not written by sl.save: load another checkpoint")
        version, num_bytes, crc32 = map(int, header.groups())
        _check_format(version)
        if num_bytes != found.st_size:
            raise ValueError(
                f"it is damaged: it has {found.st_size} bytes instead of {num_bytes}: load another "
                "checkpoint"
            )
        body = file.read(num_bytes - HEADER_BYTES)
    if zlib.crc32(body) != crc32:
        raise ValueError("it is damaged: its checksum does not match: load another checkpoint")
    return head + body


def _check_format(version: int) -> None:
    if version != FORMAT:
        raise ValueError(
            f"it has format {version}, but this version of Stageline reads format {FORMAT}, which "
            "has checksums: load it with the version that saved it"
        )
