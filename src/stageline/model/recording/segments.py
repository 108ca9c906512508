"""Cut a tape into segments, one for each layer: after each call of a module that has parameters.

    glue  embed  glue │ layers.0  glue │ layers.1  glue  norm  glue │ …

Between two such calls the cut is where the fewest bytes pass, behind the last function that draws
random numbers or uses weights of the module that was called: these belong to the call before them.
What depends on the batch alone (masks, positions, shifted labels) is in no segment: it is computed
when the batch arrives, on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from stageline.model.recording.replay import OperationGroup, prepared
from stageline.model.recording.tape import START, Operation, Tape


@dataclass(frozen=True)
class Segment:
    """The part of a tape that one layer runs."""

    name: str  # of its first call of a module that has parameters
    operations: tuple[Operation, ...]
    reads: tuple[str, ...]  # values of earlier segments
    writes: tuple[str, ...]  # values for later segments
    num_bytes: Mapping[str, int]  # of the values that it reads

    @cached_property
    def used(self) -> set[str]:
        """The names of the modules, parameters and buffers that it uses."""
        modules = {each.module for each in self.operations if each.module is not None}
        return modules | {name for each in self.operations for name in each.arguments.state}


@dataclass(frozen=True)
class CutTape:
    """A tape in parts: what is computed before the layers, and the layers."""

    tape: Tape
    before: tuple[Operation, ...]
    inputs: frozenset[str]  # what layers read of the batch, or of what is computed before
    segments: tuple[Segment, ...]

    @cached_property
    def prepared_before(self) -> tuple[OperationGroup, ...]:
        """The operations that are computed before the layers, ready to run."""
        return prepared(self.before, self.inputs)


def cut_tape(tape: Tape, with_parameters: Collection[str], like: CutTape | None = None) -> CutTape:
    """Cut a tape, `like` another one of the model if there is one: so that the same values pass."""
    before = input_only(tape)
    rest = [number for number in range(len(tape.operations)) if number not in before]
    operations = [tape.operations[number] for number in rest]
    cuts = _cuts(tape, operations, rest, with_parameters, like)
    ranges = [operations[a:b] for a, b in pairwise([0, *cuts, len(operations)])]
    known = set(tape.inputs) | {n for i in before for n in tape.operations[i].all_writes}
    segments = tuple(_segments(tape, ranges, with_parameters, known))
    read = {name for each in operations for name in each.reads} | set(tape.output.values)
    first = tuple(tape.operations[number] for number in sorted(before))
    return CutTape(tape, first, frozenset(read & known), segments)


def input_only(tape: Tape) -> set[int]:
    """Return the operations that depend on the batch alone: not on layers, weights or chance.

    What a layer changes in place later is not among them, nor what follows from it.
    """
    excluded: set[int] = set()
    while True:
        found = _input_only(tape, excluded)
        changed = {a for a, b in tape.inseparable if a in found and b not in found}
        if not changed:
            return found
        excluded |= changed


def _input_only(tape: Tape, excluded: Collection[int]) -> set[int]:
    known = set(tape.inputs) - tape.has_gradient
    found = set()
    for number, each in enumerate(tape.operations):
        is_plain = each.module is None and not each.is_random and not each.arguments.state
        if is_plain and number not in excluded and known.issuperset(each.reads):
            found.add(number)
            known.update(each.all_writes)
    return found


def _cuts(
    tape: Tape,
    operations: Sequence[Operation],
    numbers: Sequence[int],
    with_parameters: Collection[str],
    like: CutTape | None,
) -> list[int]:
    """Return the places where segments begin, but for the first."""
    calls = [i for i, each in enumerate(operations) if each.module in with_parameters]
    live, joined = _live_values(tape, operations), _joined(tape, numbers)
    expected = {} if like is None else _values_before(like)
    found = []
    for first, second in pairwise(calls):
        name = operations[second].call
        if like is not None and name not in expected:
            continue
        bound = [i + 1 for i in range(first, second) if _stays(operations[i], operations[first])]
        allowed = [at for at in range(max(first + 1, *bound, 0), second + 1) if at not in joined]

        def rank(at: int, name: str = name) -> tuple[int, int, int]:
            extra = live[at].keys() - expected[name] if like is not None else set()
            return len(extra), sum(live[at].values()), at

        if allowed:
            found.append(min(allowed, key=rank))
    return found


def _stays(function: Operation, call: Operation) -> bool:
    """Return whether a function belongs to the call before it: it draws, or uses its weights."""
    return function.is_random or any(
        name.startswith(f"{call.module}.") for name in function.arguments.state
    )


def _values_before(cut: CutTape) -> dict[str, set[str]]:
    """Return the values that pass into each segment or beyond it, by the segment's name."""
    found: dict[str, set[str]] = {}
    passing: set[str] = set()
    for segment in reversed(cut.segments):
        passing = (passing - set(segment.writes)) | set(segment.reads)
        found[segment.name] = passing
    return found


def _live_values(tape: Tape, operations: Sequence[Operation]) -> list[dict[str, int]]:
    """Return for each place the values that are made before it and read from it on, with sizes."""
    last: dict[str, int] = {}
    for place, each in enumerate(operations):
        last |= dict.fromkeys(each.reads, place)
    last |= dict.fromkeys(tape.output.values, len(operations))
    sizes: dict[str, int] = {}
    live: dict[str, int] = {}
    found = []
    for place in range(len(operations) + 1):
        live = {name: size for name, size in live.items() if last.get(name, -1) >= place}
        found.append(live)
        for each in operations[place : place + 1]:
            sizes |= _sizes(each, sizes)
            live = live | {name: sizes[name] for name in each.all_writes}
    return found


def _sizes(operation: Operation, known: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of what an operation writes; what it only changes keeps its size."""
    own = dict(zip(operation.writes, operation.num_bytes, strict=True))
    return own | {pair.new: known.get(pair.old, 0) for pair in operation.renamed}


def _joined(tape: Tape, numbers: Sequence[int]) -> set[int]:
    """Return the places where a cut would part operations that have to stay together."""
    places = {number: place for place, number in enumerate(numbers)}
    found: set[int] = set()
    for first, last in tape.inseparable:
        if first in places and last in places:
            found.update(range(places[first] + 1, places[last] + 1))
    return found


def _segments(
    tape: Tape,
    ranges: Sequence[Sequence[Operation]],
    with_parameters: Collection[str],
    known: Collection[str],
) -> list[Segment]:
    made_in: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for number, operations in enumerate(ranges):
        for each in operations:
            made_in |= dict.fromkeys(each.all_writes, number)
            sizes |= _sizes(each, sizes)
    read = [dict.fromkeys(n for each in part for n in each.reads) for part in ranges]
    read[-1] |= dict.fromkeys(tape.output.values)
    found = []
    for number, operations in enumerate(ranges):
        later = {n for names in read[number + 1 :] for n in names}
        writes = [n for each in operations for n in each.all_writes if n in later]
        reads = tuple(n for n in read[number] if n not in known and made_in[n] < number)
        calls = (each.call for each in operations if each.module in with_parameters)
        name = next(calls, START)
        sent = {name: sizes[name] for name in reads}
        found.append(Segment(name, tuple(operations), reads, tuple(dict.fromkeys(writes)), sent))
    return found
