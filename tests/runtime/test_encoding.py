"""Messages between ranks as bytes that run no code when they are read."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.model.trees import flatten, unflatten
from stageline.runtime.backends.processes.messages.encoding import (
    decode,
    encode,
    spec_from_text,
    spec_to_text,
)
from stageline.runtime.backends.processes.messages.shapes import ValueSpec

SOURCE = Path(sl.__file__).parent


class Colour(Enum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


class Access(Flag):
    READ = auto()
    WRITE = auto()


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output:
    logits: Any
    hidden: Any = None
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append("by its own code")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Encoding(UserDict[str, Any]):
    pass


VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**53),
    10**5000,
    -(7**9000),
    0.1,
    -0.0,
    5e-324,
    float("inf"),
    1 + 2j,
    complex(0.0, -0.0),
    "",
    "ü\ud800 \x00 \u2028",
    b"\x00\xff",
    Colour.RED,
    Number.ONE,
    Access.READ | Access.WRITE,
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.strided,
    torch.channels_last,
    torch.Size([2, 3]),
    np.float64(0.1),
    np.int8(-3),
    Path("a/b"),
    (),
    [],
    {},
    ((), [[]], {"a": {}}),
    {3: 1, "3": 2, (1, "x"): 3, None: 4, 2.5: 5, torch.float32: 6, Colour.RED: 7, b"k": 8},
    OrderedDict(b=1, a=2),
    defaultdict(list, a=[1]),
    deque([1, 2], maxlen=5),
    MappingProxyType({"a": 1}),
    Pair(1, Pair(2, None)),
    Frozen((1, 2)),
    ["int", "0x1"],  # looks like our own marks
    {"tensor": ["tensor", 1]},
]


def test_a_value_comes_back_with_its_types() -> None:
    for value in VALUES:
        found = decode(encode(value))
        assert type(found) is type(value)
        assert found == value
        if not isinstance(value, int):  # large ones have no text
            assert repr(found) == repr(value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(decode(encode(float("nan"))))


def test_what_holds_attributes_comes_back_and_no_code_of_its_class_runs() -> None:
    found = decode(encode(Output(1, Encoding(a=2))))
    assert found == Output(1, Encoding(a=2), [])
    assert found.made == ["by its own code"]  # once, by us
    assert type(found.hidden) is Encoding


TENSORS = [
    torch.randn(3, 4),
    torch.randn(3, 4).t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(6)[::2],
    torch.tensor(5),
    torch.empty(0, 3),
    torch.randn(2, dtype=torch.bfloat16),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
    torch.randn(3).to(torch.float8_e5m2),
    torch.ones(1).expand(4),
    torch.tensor([math.nan, -math.inf, -0.0]),
]


def test_a_tensor_comes_back_with_its_bits() -> None:
    for tensor in TENSORS:
        found, other = decode(encode({"a": (tensor, torch.ones(2, requires_grad=True))}))["a"]
        assert found.dtype is tensor.dtype
        assert found.shape == tensor.shape
        assert found.stride() == torch.empty_like(tensor).stride()
        assert torch.equal(bits(found), bits(tensor))
        assert not found.requires_grad
        assert other.requires_grad


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def local_class() -> object:
    @dataclass
    class Local:
        x: int

    return Local(1)


class Text(str):
    __slots__ = ()


REFUSED: list[tuple[Any, str]] = [
    (lambda: 0, "a function cannot be sent"),
    (object(), "a object cannot be sent"),
    (nn.Linear(1, 1), "a Linear cannot be sent"),
    ({"a": [{1, 2}]}, "a set cannot be sent"),
    (Text("x"), "a Text cannot be sent"),
    (print, "builtin_function_or_method cannot be sent"),
    (local_class(), "define it at the top level of a module"),
    (defaultdict(lambda: 0), "a function cannot be sent"),
    (torch.empty(2, device="meta"), "plain dense tensors"),
    (torch.eye(2).to_sparse(), "plain dense tensors"),
    (np.str_("x"), "send a number"),
    (range(3), "a range cannot be sent"),
]


def test_what_cannot_be_sent_is_refused() -> None:
    for value, words in REFUSED:
        with pytest.raises(sl.ModelError, match=re.escape(words)):
            encode(value)


def message(spec: Any, leaves: list[Any]) -> bytes:
    text = json.dumps([spec, leaves]).encode()
    return len(text).to_bytes(8, "little") + text


FORGED: list[tuple[Any, list[Any], str]] = [
    (["subprocess:Popen", None, [0]], ["x"], "not a container"),
    (["os:system", None, [0]], ["true"], "not a container"),
    (["builtins:eval", None, [0]], ["1"], "not a container"),
    (["antigravity:Any", None, []], [], "antigravity is not imported"),
    ([f"{__name__}:Colour", None, [0]], [1], "not a container"),
    (0, [["enum", "subprocess:Popen", "x"]], "or Enum"),
    (0, [["flag", f"{__name__}:Colour", "red"]], "not a container or Enum"),
    (0, [["factory", "eval"]], "KeyError"),
    (0, [["dtype", "load"]], "torch has no dtype"),
    (0, [["unknown", 1]], "KeyError"),
    (0, [], "fewer leaves"),
    (0, [1, 2], "more leaves"),
    (0, [["tensor", "float32", [10**12], [1], "cpu", False]], "does not fit"),
    (0, [["tensor", "uint8", [1, 1], [-1, 1], "cpu", False]], "does not fit"),
    (["tuple", None, 5], [], "cannot be read"),
]


def test_a_message_that_asks_for_more_than_values_is_refused() -> None:
    for spec, leaves, words in FORGED:
        with pytest.raises(sl.StageError, match=words):
            decode(message(spec, leaves))


def test_bytes_that_are_no_message_are_refused() -> None:
    whole = encode({"a": torch.ones(3), "b": Output(1)})
    for damaged in (b"", whole[:-1], whole[:20], b"\xff" * 40, whole[8:]):
        with pytest.raises(sl.StageError, match="cannot be read"):
            decode(damaged)


def test_a_tree_without_its_leaves_comes_back_from_its_text() -> None:
    value = {"a": Pair(1, [Output(2, (3, Encoding(b=4)))]), 5: OrderedDict(c=(torch.ones(1),))}
    leaves, spec = flatten(value)
    assert spec_from_text(spec_to_text(spec)) == spec
    assert unflatten(leaves, spec_from_text(spec_to_text(spec))) == value


def test_a_shape_comes_back_from_its_description() -> None:
    shape = ValueSpec.of({"a": (torch.ones(2, 3).t(), "text"), "b": Output(None)})
    found = ValueSpec.from_description(decode(encode(shape.description)))
    assert found == shape


def test_no_source_file_reads_or_writes_pickles() -> None:
    """Messages and files may come from others, and pickles run code when they are read."""
    words = r"pickle|dill|marshal|shelve|_object_list|gather_object|torch\.load\(|torch\.save\("
    words += r"|\beval\(|\bexec\(|send_object|recv_object|treespec_loads|rpc_sync"
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(words, line) and not re.search(r"\.eval\(|def eval\(|`eval\(", line)
    ]
    assert not found
