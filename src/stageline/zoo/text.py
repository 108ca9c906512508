"""Text that every machine has: the modules of Python's own standard library, as tokens.

A token is a printable ASCII character, the end of a line, or four spaces: so indentation is soon
learned.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from stageline.errors import BatchError

INDENT = " " * 4
CHARACTERS = "\t\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))  # a tab is an indent
VOCABULARY = len(CHARACTERS)
NUMBERS = bytes.maketrans(CHARACTERS.encode(), bytes(range(VOCABULARY)))


def standard_library() -> str:
    """The source of all public top-level modules, in the order of their names: about 4 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_text("utf-8", "ignore") for path in sorted(folder.glob("[a-z]*.py"))]
    if not modules:
        raise BatchError(f"{folder} holds no source, but it is the text: use a Python with source")
    return "".join(modules)


def tokens(text: str) -> Tensor:
    """In a byte each; characters that are no tokens are left out.

    >>> tokens("    if x:\\n").tolist()
    [0, 75, 72, 2, 90, 28, 1]
    """
    known = re.sub(r"[^\n -~]", "", text.expandtabs()).replace(INDENT, "\t")
    return torch.frombuffer(bytearray(known.encode().translate(NUMBERS)), dtype=torch.uint8)


def characters(token: int) -> str:
    """What a token stands for."""
    return CHARACTERS[token].replace("\t", INDENT)


def batch(
    text: Tensor, step: int, *, size: int, context: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Passages for a step and, as target, the token after each; always the same for the step."""
    # a CPU's generator heeds the lower 32 bits of its seed alone
    generator = torch.Generator().manual_seed(1_000_000 * seed + step)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    passages = text[starts + torch.arange(context + 1)].long()
    return passages[:, :-1], passages[:, 1:]
