"""Write the configuration of the user's model as the files that `from_pretrained` reads.

Everything here is for objects that behave like those of transformers, which is not imported.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from stageline.checkpoint.pretrained.shared_names import user_models
from stageline.pipeline import Pipeline

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


def write_config_files(pipe: Pipeline, folder: Path) -> None:
    """Write the configuration of the first of the user's modules that has one."""
    for model in user_models(pipe):
        config = getattr(model, "config", None)
        if _can_be_written(config):
            _write(_described(config, model), folder, CONFIG)
            generation = getattr(model, "generation_config", None)
            if _can_be_written(generation):
                _write(generation, folder, GENERATION_CONFIG)
            return


def _can_be_written(config: object) -> bool:
    names = ("save_pretrained", "to_json_string")
    return any(callable(getattr(config, name, None)) for name in names)


def _described(config: Any, model: nn.Module) -> Any:
    """Return a copy with the class and dtype of the model, as `save_pretrained` writes it.

    With an earlier dtype, `from_pretrained` would convert the weights.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]
    dtypes = (each.dtype for each in model.parameters() if each.is_floating_point())
    dtype = next(dtypes, None)
    if hasattr(config, "dtype") and dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    return config


def _write(config: Any, folder: Path, name: str) -> None:
    if callable(getattr(config, "save_pretrained", None)):
        config.save_pretrained(folder)
    else:
        (folder / name).write_text(config.to_json_string(), encoding="utf-8")
