"""What a command line names as `module:function`: a user's own model, found and called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from stageline.arguments import shown
from stageline.errors import ModelError, StagelineError


def call(reference: str) -> Any:
    """What `function()` of `module` returns; the module may be a file in the current folder."""
    function = _function(reference)
    with _told(f"{reference} was called"):
        return function()


@contextmanager
def _told(when: str) -> Iterator[None]:
    """Tell what a user's own code raises in a line, with the place."""
    try:
        yield
    except StagelineError:
        raise
    except (Exception, SystemExit) as error:
        last = extract_tb(error.__traceback__)[-1]
        place, said = f"{last.filename}, line {last.lineno}", str(error)
        if isinstance(error, SyntaxError) and error.filename:
            place, said = f"{error.filename}, line {error.lineno}", error.msg
        words = said.strip().splitlines() or ["without a message"]
        raise ModelError(
            f"{type(error).__name__} was raised when {when}: {words[0]} ({place})"
        ) from error


def _function(reference: str) -> Callable[[], Any]:
    module_name, colon, name = reference.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        module_name = Path(module_name.removesuffix(".py")).as_posix().replace("/", ".")
    if not (module_name and colon and name):
        raise ModelError(
            f"the model is {shown(reference)}, but has to be module:function, as in my_model:build"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ModelError(
            f"the model is {shown(reference)}, but {shown(reference.partition(':')[0])} is no name "
            "of a module in the current folder or below: go to its folder, and use my_model:build"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with _told(f"{module_name} was imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing != module_name and not module_name.startswith(f"{missing}."):
                raise  # it is there, and misses something itself
            raise ModelError(
                f"there is no module {shown(missing)} in the current folder or among those "
                "installed"
            ) from error
        function = getattr(module, name, None)
    if not callable(function):
        raise ModelError(f"module {module_name!r} has no function {shown(name)}")
    return function  # type: ignore[no-any-return]
