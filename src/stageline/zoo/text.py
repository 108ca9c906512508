"""A data set that every machine has: the source of Python's standard library, as tokens.

A token is a printable ASCII character, a line end, or four spaces, so that models learn indentation
quickly.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from stageline.errors import BatchError

INDENT = " " * 4
CHARACTERS = "\t\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))  # a tab stands for INDENT
VOCABULARY = len(CHARACTERS)
NUMBERS = bytes.maketrans(CHARACTERS.encode(), bytes(range(VOCABULARY)))


def standard_library() -> str:
    """Return the source of all public top-level modules, sorted by name: about 4 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_text("utf-8", "ignore") for path in sorted(folder.glob("[a-z]*.py"))]
    if not modules:
        raise BatchError(
            f"{folder} holds no source files, which are the data set: use a Python with its source"
        )
    return "".join(modules)


def tokens(text: str) -> Tensor:
    """Return the tokens of a text, one byte each; other characters are omitted.

    >>> tokens("    if x:\\n").tolist()
    [0, 75, 72, 2, 90, 28, 1]
    """
    known = re.sub(r"[^\n -~]", "", text.expandtabs()).replace(INDENT, "\t")
    return torch.frombuffer(bytearray(known.encode().translate(NUMBERS)), dtype=torch.uint8)


def characters(token: int) -> str:
    """Return the text of a token."""
    return CHARACTERS[token].replace("\t", INDENT)


def batch(
    text: Tensor, step: int, *, size: int, context: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step; a target is the token after each input token.

    The same step always has the same batch.
    """
    # the CPU generator uses only the lower 32 bits of its seed
    generator = torch.Generator().manual_seed(1_000_000 * seed + step)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    passages = text[starts + torch.arange(context + 1)].long()
    return passages[:, :-1], passages[:, 1:]
