"""The catalogue of real models by name: first those that people ask for, then many more."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from benchmarks.models.case import Case, Maker
from torch import nn

FAMILIES = {  # file of this package: the libraries that it needs
    "decoders": ("transformers",),
    "encoders": ("transformers",),
    "encoder_decoders": ("transformers",),
    "vision_transformers": ("transformers",),
    "speech_and_pairs": ("transformers",),
    "torchvision_models": ("torchvision",),
    "timm_models": ("timm", "torchvision"),
    "plain_modules": ("torch",),
    "plain_vision": ("torch",),
    "graphs_and_recommenders": ("torch",),
}
NAMED = (
    *("Llama", "Qwen3", "Mixtral", "GPT-2", "BERT", "T5", "ViT"),
    *("resnet50", "vit_b_16", "densenet121", "convnext", "swin"),
    *("nn.Transformer", "U-Net", "LSTM language model", "DLRM", "masks and branches"),
)


def missing_libraries() -> list[str]:
    needed = {library for libraries in FAMILIES.values() for library in libraries}
    return sorted(library for library in needed if not find_spec(library))


def catalogue() -> dict[str, Maker]:
    """Return what makes each model; those of libraries that are not installed are left out."""
    found: dict[str, Maker] = {}
    missing = set(missing_libraries())
    for family, libraries in FAMILIES.items():
        if not missing.intersection(libraries):
            found |= import_module(f"{__name__}.{family}").CASES
    first = [name for name in NAMED if name in found]
    return {name: found[name] for name in dict.fromkeys([*first, *found])}


def make_case(name: str) -> Case:
    """Return a model with the same weights in every process.

    Some start with weights of zeros, such as the head of vit_b_16, behind which all gradients would
    be zeros as well; these get other values.
    """
    torch.manual_seed(0)
    case = catalogue()[name]()
    for parameter_name, parameter in case.model.named_parameters():
        if parameter_name.endswith("weight") and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return case
