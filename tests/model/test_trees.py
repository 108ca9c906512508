"""Containers of any class are taken apart and put together again as they were."""

from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.trees import flatten, paths, unflatten

T = TypeVar("T")


class Pair(NamedTuple):
    left: Any
    right: Any


class PairWithMore(Pair):
    """A subclass with further attributes."""


@dataclass
class Output:
    logits: Any
    loss: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: Any
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 7)


@dataclass(slots=True)
class Slotted:
    logits: Any
    unset: Any = field(init=False)


@dataclass(slots=True)
class MoreSlots(Slotted):
    hidden: Any = ()


@dataclass(kw_only=True)
class Named(Output):
    mask: Any
    scale: InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.logits = self.logits * scale
        self.note = "an attribute that is no field"


@dataclass
class Typed(Generic[T]):
    logits: T


class Encoding(UserDict[str, Any]):
    """Like the batches of tokenizers: keys are attributes too."""

    def __init__(self, data: Any, kind: str) -> None:
        super().__init__(data)
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Dotted(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Checked(OrderedDict[str, Any]):
    def __init__(self, *, must_be_given: Any) -> None:
        super().__init__(first=must_be_given)

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError("tensors only")
        super().__setitem__(key, value)


class Defaults(defaultdict[str, Any]):
    pass


@dataclass
class AttributesAndItems(OrderedDict[str, Any]):
    """Like transformers' outputs, but not registered."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "loss"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Registered(OrderedDict[str, Any]):
    pass


pytree.register_pytree_node(
    Registered,
    lambda node: (list(node.values()), list(node.keys())),
    lambda values, keys: Registered(zip(keys, values, strict=True)),
)


@dataclass
class RegisteredData:
    logits: Any
    loss: Any = None


pytree.register_dataclass(RegisteredData)


class Boxes(list[Any]):
    def __init__(self, items: Any, unit: str) -> None:
        super().__init__(items)
        self.unit = unit


def tensor() -> Tensor:
    return torch.arange(3.0)


def with_attribute(container: Any) -> Any:
    container.note = tensor()
    return container


CONTAINERS: list[Any] = [
    tensor(),
    None,
    3,
    "text",
    (),
    [],
    {},
    (tensor(), [tensor(), None], {"b": tensor(), "a": 1}),
    Pair(tensor(), (tensor(),)),
    with_attribute(PairWithMore(tensor(), None)),
    torch.Size([2, 3]),
    torch.max(torch.eye(3), dim=0),
    pack_sequence([torch.ones(3), torch.ones(2)]),
    OrderedDict(b=tensor(), a=tensor()),
    with_attribute(OrderedDict(b=tensor())),
    defaultdict(list, b=[tensor()]),
    deque([tensor(), tensor()], maxlen=2),
    MappingProxyType({"b": tensor(), "a": None}),
    Output(tensor()),
    Output((tensor(), Output(None, tensor()))),
    Frozen(tensor()),
    Slotted(tensor()),
    MoreSlots(tensor(), (tensor(),)),
    Named(logits=tensor(), mask=None, scale=2),
    Typed(tensor()),
    Encoding({"ids": tensor(), "mask": None}, "fast"),
    Dotted(b=tensor(), a=Dotted(c=tensor())),
    Checked(must_be_given=tensor()),
    Defaults(dict, {"b": {"a": tensor()}}),
    Counter(b=2, a=1),
    ChainMap({"b": tensor()}, {"a": tensor()}),
    AttributesAndItems(logits=tensor()),
    Registered(b=tensor(), a=None),
    RegisteredData(tensor()),
    Boxes([tensor(), tensor()], "px"),
]


def state(tree: Any) -> Any:
    """Return everything in a container in order, in a form that can be compared."""
    if isinstance(tree, Tensor):
        return tree.tolist()
    items: list[Any]
    if isinstance(tree, dict | MappingProxyType):
        items = [(key, state(value)) for key, value in tree.items()]
    elif isinstance(tree, tuple | list | deque):
        items = [state(item) for item in tree]
    else:
        items = [tree] if isinstance(tree, int | str) else []
    names = [*getattr(tree, "__dict__", {}), *getattr(type(tree), "__match_args__", ())]
    found = {name: state(getattr(tree, name)) for name in names if hasattr(tree, name)}
    factory = tree.default_factory if isinstance(tree, defaultdict) else None
    return type(tree), items, found, factory, tree.maxlen if isinstance(tree, deque) else None


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_a_container_is_put_together_as_it_was(tree: Any) -> None:
    leaves, spec = flatten(tree)
    assert state(unflatten(leaves, spec)) == state(tree)
    assert flatten(unflatten(leaves, spec))[1] == spec
    assert not any(isinstance(leaf, dict | list | tuple) or is_dataclass(leaf) for leaf in leaves)
    assert len(paths(spec)) == len(leaves)


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_mapping_reaches_every_tensor_and_leaves_the_original_alone(tree: Any) -> None:
    before = state(tree)
    doubled = trees.map_leaves(lambda x: x * 2 if isinstance(x, Tensor) else x, tree)
    assert type(doubled) is type(tree)
    assert state(tree) == before
    assert [t.tolist() for t in trees.tensors(doubled)] == [
        (2 * t).tolist() for t in trees.tensors(tree)
    ]


def test_leaves_come_in_the_order_of_the_tree() -> None:
    tree = {"z": 1, "a": Output(2, [3, 4]), 0: None}
    leaves, spec = flatten(tree)
    assert leaves == [1, 2, 3, 4, None]
    assert paths(spec) == ["['z']", "['a'].logits", "['a'].loss[0]", "['a'].loss[1]", "[0]"]


def test_paths_of_leaves_read_like_code() -> None:
    def places(tree: Any) -> list[str]:
        return paths(flatten(tree)[1])

    assert places(tensor()) == [""]
    assert places(Pair(1, (2, 3))) == [".left", ".right[0]", ".right[1]"]
    assert places(Encoding({"ids": 1}, "fast")) == [".data['ids']", ".kind"]
    assert places(Registered(a=1)) == [".a"]
    assert places(RegisteredData([1])) == [".logits[0]"]
    assert places(Boxes([1], "px")) == ["[0]", ".unit"]
    assert places(deque([1])) == ["[0]"]


def test_specs_compare_and_are_hashable() -> None:
    for tree in (Output(1, (2,)), Pair(1, 2), {"a": 1}, OrderedDict(a=1), Encoding({"a": 1}, "x")):
        other = trees.map_leaves(lambda item: [item][0], tree)
        assert hash(flatten(tree)[1]) == hash(flatten(other)[1])
    assert flatten(Output(1, None))[1] != flatten(Output(1, (None,)))[1]
    assert flatten({"a": 1})[1] != flatten(OrderedDict(a=1))[1]
    assert flatten({"a": 1, "b": 2})[1] != flatten({"b": 2, "a": 1})[1]


def test_fields_of_a_dataclass_come_in_their_order_whenever_they_were_set() -> None:
    early, late = Output(1, 2), Output(1, 2)
    del late.logits
    late.logits = 1
    assert list(vars(late)) == ["loss", "logits"]
    assert flatten(late)[1] == flatten(early)[1]


def test_an_attribute_that_is_an_item_too_stays_one_tensor() -> None:
    tree = AttributesAndItems(logits=tensor())
    assert len(trees.tensors(tree)) == 1
    other = trees.map_leaves(trees.cloned, tree)
    assert other.logits is other["logits"]
    assert other.logits is not tree.logits


def test_cached_properties_are_computed_again() -> None:
    @dataclass
    class Batch:
        x: Tensor

        @cached_property
        def size(self) -> int:
            return len(self.x)

    batch = Batch(torch.ones(8))
    assert batch.size == 8
    assert trees.map_leaves(lambda x: x[:2], batch).size == 2


def test_a_container_is_not_made_by_its_own_init() -> None:
    @dataclass
    class Counted:
        x: Any
        seen: int = 0

        def __post_init__(self) -> None:
            self.seen += 1

    assert unflatten([5, 1], flatten(Counted(5))[1]) == Counted(5)


def test_other_objects_are_leaves() -> None:
    class Opaque(Mapping[str, Any]):
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __getitem__(self, key: str) -> Any:
            return self.x

        def __iter__(self) -> Iterator[str]:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    class Plain:
        x = 1

    @dataclass
    class HiddenError(Exception):  # its arguments are hidden in C
        x: int

    @dataclass(eq=False)
    class Part(nn.Module):
        x: int

        def __post_init__(self) -> None:
            super().__init__()

    for leaf in (Plain(), Output, HiddenError(1), {1, 2}, frozenset("a"), range(3), slice(2)):
        assert flatten((leaf,))[0] == [leaf]
    part = object.__new__(Part)
    nn.Module.__init__(part)
    assert flatten(part)[0] == [part]
    assert trees.tensors(Opaque(tensor()))  # a mapping written in Python is one


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ModelError, match="a list contains itself or is nested too deep"):
        flatten(tree)


def test_too_few_or_too_many_leaves_are_refused() -> None:
    spec = flatten((1, [2]))[1]
    with pytest.raises(ValueError, match="fewer leaves"):
        unflatten([1], spec)
    with pytest.raises(ValueError, match="more leaves"):
        unflatten([1, 2, 3], spec)


def test_a_packed_sequence_keeps_its_order() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    other = trees.map_leaves(trees.identity, packed)
    assert isinstance(other, PackedSequence)
    pairs = zip(other, packed, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)
