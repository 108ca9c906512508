"""Prints a hash of text, which differs between ranks, and orders that must not."""

from __future__ import annotations

from tests.model.test_inputs import batch, named
from tests.model.test_trees import Dotted, Encoding, MoreSlots, Output

from stageline.model.inputs import named_inputs
from stageline.model.layers import LayerSequence
from stageline.model.trees import flatten, paths


def main() -> None:
    print(hash("x"))
    print(list(named_inputs(LayerSequence.of(named()), batch())))
    tree = Output(*"ab"), Encoding({"x": 1, "mask": 2}, "k"), MoreSlots(1), Dotted(z=1, a=2)
    leaves, spec = flatten(tree)
    print(paths(spec), leaves)


if __name__ == "__main__":
    main()
