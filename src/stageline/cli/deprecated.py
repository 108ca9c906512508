"""Old names of options and commands, which work for one release with a warning."""

from __future__ import annotations

import os
from copy import copy
from functools import cached_property
from typing import Any

import typer
from typer.core import TyperCommand

PIPELINE = {"--ranks": "--num-ranks", "--microbatches": "--num-microbatches"}
SCHEDULE = PIPELINE | {"--chunks": "--chunks-per-rank", "--minibatches": "--num-minibatches"}
RENAMED = {
    "draw": SCHEDULE,
    "simulate": SCHEDULE,
    "verify": PIPELINE,
    "demo": {"--ranks": "--num-ranks"},
    "run": {"--ranks": "--num-processes", "-p": "--num-processes"},
    "links": {"--ranks": "--num-processes"},
    "profile": {"--ranks": "--jobs"},
    "plan": {"--ranks": "--jobs", "--batch": "--batch-size", "--devices": "--num-devices"},
}


class Command(TyperCommand):
    """A command that also takes the old names of its options, which its help does not show."""

    @cached_property
    def aliases(self) -> dict[Any, str]:
        """Return the options under their old names, each with its new name."""
        aliases = {}
        for old, new in RENAMED.get(self.name or "", {}).items():
            alias = copy(next(option for option in self.params if new in option.opts))
            alias.opts = [old]
            aliases[alias] = new
        return aliases

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for alias in self.aliases:
            alias.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        *_, used = self.make_parser(ctx).parse_args(args=list(args))
        for alias, new in self.aliases.items():
            if alias in used:
                _warn(alias.opts[0], new)
        return super().parse_args(ctx, args)


def current_command(args: list[str]) -> list[str]:
    """Return the arguments with `profile --links` replaced by `links`."""
    if args[:1] != ["profile"] or "--links" not in args:
        return args
    _warn("stageline profile --links", "stageline links")
    return ["links", *(word for word in args[1:] if word != "--links")]


def _warn(old: str, new: str) -> None:
    """Print a warning; under torchrun only one process does."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"warning: {old} is deprecated: write {new}", err=True)
