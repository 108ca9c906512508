"""What a command line names as `module:function`: a user's own model, found and called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageline.errors import ModelError


def call(reference: str) -> Any:
    """What `function()` of `module` returns; the module may be a file in the current folder."""
    return _function(reference)()


def _function(reference: str) -> Callable[[], Any]:
    module_name, colon, name = reference.partition(":")
    module_name = module_name.removesuffix(".py").replace("/", ".")
    if not (module_name and colon and name):
        raise ModelError(
            f"the model is {reference!r}, but has to be module:function, as in my_model:build"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise  # it is there, and misses something itself
        raise ModelError(
            f"there is no module {module_name!r} in the current folder or among those installed"
        ) from error
    if not callable(function := getattr(module, name, None)):
        raise ModelError(f"module {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]
