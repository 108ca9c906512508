"""Private names of torch exist in this release, and are used in the files for them only."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stageline
from stageline import torch_private, torch_private_training
from stageline.torch_private import (
    PRIVATE_ATTRIBUTES,
    is_compiled,
    mark_as_stepped,
    run_backward,
)

SOURCE = Path(stageline.__file__).parent
FILES = sorted(SOURCE.glob("torch_private*.py"))
PRIVATE_NAMES = (*torch_private.PRIVATE_NAMES, *torch_private_training.PRIVATE_NAMES)
PRIVATE = {part for name in PRIVATE_NAMES for part in name.split(".") if part.startswith("_")}
PRIVATE |= set(PRIVATE_ATTRIBUTES)


def look_up(name: str) -> None:
    """Import and follow a dotted name; raise ImportError or AttributeError with what is missing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
            break
        except ModuleNotFoundError:
            continue
    else:
        raise ImportError(name)
    for part in parts[length:]:
        annotations = vars(found).get("__annotations__", {}) if isinstance(found, type) else {}
        if part in annotations:  # set on instances only
            return
        found = getattr(found, part)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_this_release_of_torch_has_the_private_name(name: str) -> None:
    look_up(name)


@pytest.mark.parametrize("name", ["torch.Tensor._removed", "torch.nn.Module._removed"])
def test_a_name_that_was_removed_is_noticed(name: str) -> None:
    with pytest.raises(AttributeError, match="_removed"):
        look_up(name)


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private name of torch in a source file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if name.startswith("_"))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
            yield from ((node.lineno, name) for name in names if "._" in name)
        elif isinstance(node, ast.Attribute) and is_private(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield node.lineno, node.value


def is_private(node: ast.Attribute) -> bool:
    is_of_torch = ast.unparse(node).split(".")[0] == "torch"
    is_hidden = node.attr.startswith("_") and not node.attr.startswith("__")
    return node.attr in PRIVATE or (is_of_torch and is_hidden)


@pytest.mark.parametrize(
    "code",
    [
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "torch._C._get_tracing_state()",
        "weight._version",
        "getattr(module, '_orig_mod')",
    ],
)
def test_a_private_name_in_code_is_found(code: str) -> None:
    assert list(private_uses(ast.parse(code)))


def test_private_names_of_torch_are_used_in_files_for_them_only() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path not in FILES
        for line, name in private_uses(ast.parse(path.read_text()))
    ]
    assert not found, "use a function of torch_private.py instead"


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_private_name_in_a_file_is_listed(file: Path) -> None:
    used = {name.rpartition(".")[2] for _, name in private_uses(ast.parse(file.read_text()))}
    assert not used - PRIVATE


def test_the_public_fallback_of_a_backward_gives_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gradients() -> list[torch.Tensor | None]:
        weight, x = torch.arange(3.0, requires_grad=True), torch.ones(3, requires_grad=True)
        y = (weight * x).square()
        edges, seeds = [torch.autograd.graph.get_gradient_edge(y)], [torch.full((3,), 2.0)]
        returned = run_backward(edges, seeds, [x], accumulate=False)
        run_backward(edges, seeds, [weight])
        found = [returned[0], x.grad]
        again = (weight * x).square()
        run_backward([torch.autograd.graph.get_gradient_edge(again)], seeds)
        return [*found, weight.grad, x.grad]

    expected = gradients()
    monkeypatch.setattr(torch_private, "_ENGINE", None)
    assert str(gradients()) == str(expected)
    assert [gradient is None for gradient in expected] == [False, True, False, False]


def test_without_the_private_name_nobody_knows_which_nodes_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    assert torch_private.will_execute(None) is None


def test_a_scheduler_does_not_warn_of_an_optimizer_whose_first_step_was_skipped() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mark_as_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_compiled_module_is_recognised() -> None:
    """Nothing is compiled before the first call."""
    by_method = nn.Linear(2, 2)
    by_method.compile(backend="eager")
    by_function: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    assert is_compiled(nn.Sequential(by_function))
    assert is_compiled(nn.Sequential(by_method))
    assert not is_compiled(nn.Linear(2, 2))
