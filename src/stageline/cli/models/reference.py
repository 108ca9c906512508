"""Find and call the user's function that a command line names as `module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from stageline.arguments import shown
from stageline.errors import ModelError, StagelineError

if TYPE_CHECKING:
    from stageline.model.workload import Workload


def load_workload(reference: str) -> Workload:
    """Return the workload that the function named by `reference` makes."""
    from stageline.model.workload import Workload  # noqa: PLC0415  imports torch

    return Workload.of(call(reference))


def call(reference: str) -> Any:
    """Call `module:function`; the module may be a file in the current folder."""
    function = _find(reference)
    with _as_model_error(f"{reference} was called"):
        return function()


@contextmanager
def _as_model_error(when: str) -> Iterator[None]:
    """Turn an exception of the user's code into a one-line `ModelError` with its file and line."""
    try:
        yield
    except StagelineError:
        raise
    except (Exception, SystemExit) as error:
        last = extract_tb(error.__traceback__)[-1]
        location, text = f"{last.filename}, line {last.lineno}", str(error)
        if isinstance(error, SyntaxError) and error.filename:
            location, text = f"{error.filename}, line {error.lineno}", error.msg
        lines = text.strip().splitlines() or ["without a message"]
        raise ModelError(
            f"{type(error).__name__} was raised when {when}: {lines[0]} ({location})"
        ) from error


def _find(reference: str) -> Callable[[], Any]:
    module_name, colon, name = reference.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        module_name = Path(module_name.removesuffix(".py")).as_posix().replace("/", ".")
    if not (module_name and colon and name):
        raise ModelError(
            f"the model is {shown(reference)}, but has to be module:function, as in my_model:build"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ModelError(
            f"the model is {shown(reference)}, but {shown(reference.partition(':')[0])} is not a "
            "module in the current folder or below: change to its folder, and use my_model:build"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with _as_model_error(f"{module_name} was imported"):
        function = getattr(_import(module_name), name, None)
    if not callable(function):
        raise ModelError(f"module {module_name!r} has no function {shown(name)}")
    return function  # type: ignore[no-any-return]


def _import(module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise  # the module exists, but one of its own imports does not
        raise ModelError(
            f"there is no module {shown(missing)} in the current folder or among the installed "
            "packages"
        ) from error
