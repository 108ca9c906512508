"""Small changes that break a line of Python: a comparison, a condition, a constant, a statement."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPPOSITES = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
CLOCKS = ("monotonic", "perf_counter", "time()")  # never meet a limit exactly
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
}
WITHOUT_ARITHMETIC = (ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.JoinedStr)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Sides = tuple[ast.expr, ast.expr]


@dataclass(frozen=True)
class Mutation:
    """A change of one file: the text from `start` to `end` becomes `new`."""

    path: str  # from the root of the tree
    line: int
    kind: str
    start: int  # in characters
    end: int
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.old} → {self.new}"

    @property
    def change(self) -> str:
        return f"{_short(self.old)} → {_short(self.new)}"

    def apply(self, text: str) -> str:
        assert text[self.start : self.end] == self.old, f"{self.path} has changed since"
        return text[: self.start] + self.new + text[self.end :]


def mutations(root: Path, paths: Iterable[Path]) -> list[Mutation]:
    """Return all mutations of code in functions that still compile, in the order of the files.

    Lines for GPUs are left out: no test runs them.
    """
    found = []
    for path in sorted(paths):
        source = Source(str(path.relative_to(root)), path.read_text())
        found += [
            each
            for each in source.mutations()
            if "cuda" not in source.lines[each.line - 1] and _compiles(each.apply(source.text))
        ]
    return found


def choose(candidates: Sequence[Mutation], count: int, seed: int) -> list[Mutation]:
    """Return some on different lines, as evenly as possible over files and kinds of change.

    What is chosen depends on the candidates and the seed alone; a larger count adds to a smaller.
    """
    chance = random.Random(seed)
    left = list(candidates)
    chosen: list[Mutation] = []
    while left and len(chosen) < count:
        paths = sorted({each.path for each in left})
        for path in chance.sample(paths, len(paths)):
            kind = chance.choice(sorted({each.kind for each in left if each.path == path}))
            picked = chance.choice([e for e in left if (e.path, e.kind) == (path, kind)])
            chosen.append(picked)
            left = [e for e in left if (e.path, e.line) != (path, picked.line)]
    return chosen[:count]


class Source:
    """The text of a file and where its lines begin."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.lines = text.splitlines(keepends=True)
        self.starts = [sum(map(len, self.lines[:number])) for number in range(len(self.lines))]

    def mutations(self) -> Iterator[Mutation]:
        for node in _executed(ast.parse(self.text)):
            for kind, change in KINDS.items():
                for part, new in change(self, node):
                    yield self._mutation(kind, part, new)

    def of(self, node: ast.AST) -> str:
        return self.text[slice(*self.range(node))]

    def range(self, node: ast.AST) -> tuple[int, int]:
        """Return where the node's text begins and ends; ast counts columns in bytes."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(
            node.end_lineno, node.end_col_offset
        )

    def _at(self, line: int, column: int) -> int:
        before = self.lines[line - 1].encode()[:column]
        return self.starts[line - 1] + len(before.decode())

    def _mutation(self, kind: str, node: ast.AST, new: str) -> Mutation:
        start, end = self.range(node)
        line = self.text.count("\n", 0, start) + 1
        return Mutation(self.path, line, kind, start, end, self.text[start:end], new)


Change = Callable[[Source, ast.AST], Iterator[tuple[ast.AST, str]]]


def _comparison(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        old, new = COMPARISONS[type(node.ops[0])]
        if any(clock in source.of(node) for clock in CLOCKS):
            new = OPPOSITES.get(old, new)
        yield node, _operator(source, node, (node.left, node.comparators[0]), old, new)


def _operator(source: Source, node: ast.expr, sides: Sides, old: str, new: str) -> str:
    """Return the text of an operation with another operator; parentheses stay."""
    (start, end), (_, left), (right, _) = (source.range(each) for each in (node, *sides))
    between = source.text[left:right].replace(old, new, 1)
    return source.text[start:left] + between + source.text[right:end]


def _condition(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, f"not ({source.of(node.test)})"
    if isinstance(node, ast.comprehension):
        yield from ((test, f"not ({source.of(test)})") for test in node.ifs)


def _logic(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.BoolOp):
        operator = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({operator.join(f'({source.of(value)})' for value in node.values)})"


def _statement(_: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Leave one out; not the assignment of a name, whose absence any run would notice."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_set = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    if is_call or is_set or isinstance(node, ast.AugAssign | ast.Delete | ast.Break | ast.Continue):
        yield node, "pass"


def _constant(_: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, repr(not node.value)
        elif isinstance(node.value, int | float):
            yield node, repr(node.value + 1)


def _arguments(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Swap the first two; the text between them stays."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    first, second = node.args[:2]
    if isinstance(first, ast.Starred | ast.GeneratorExp) or isinstance(second, ast.Starred):
        return
    if source.of(first) == source.of(second):
        return
    (start, end), (a, b), (c, d) = (source.range(each) for each in (node, first, second))
    text = source.text
    yield node, text[start:a] + text[c:d] + text[b:c] + text[a:b] + text[d:end]


def _arithmetic(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        sides = (node.left, node.right)
        is_text = any(isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides)
        if not is_text and not any(isinstance(side, WITHOUT_ARITHMETIC) for side in sides):
            yield node, _operator(source, node, sides, *ARITHMETIC[type(node.op)])


def _length(source: Source, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """One less of a range or a length."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
        if node.func.id == "range":
            yield node.args[-1], f"({source.of(node.args[-1])}) - 1"
        if node.func.id == "len":
            yield node, f"({source.of(node)} - 1)"


KINDS: dict[str, Change] = {
    "swap a comparison": _comparison,
    "negate a condition": _condition,
    "swap and / or": _logic,
    "drop a statement": _statement,
    "change a constant": _constant,
    "swap arguments": _arguments,
    "swap an operator": _arithmetic,
    "off by one": _length,
}


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when functions do: no annotations, docstrings, error messages or stubs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            for statement in node.body:
                yield from _inside(statement)
        elif not isinstance(node, ast.If):  # TYPE_CHECKING
            yield from _executed(node)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, or the dots of a stub
    yield node
    if isinstance(node, Function):
        for statement in node.body:
            yield from _inside(statement)
    else:
        for name, value in ast.iter_fields(node):
            if name != "annotation":
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST):
                        yield from _inside(part)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutated", "exec")
    except SyntaxError:
        return False
    return True


def _short(text: str, longest: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
