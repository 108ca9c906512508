"""Names that have changed, and keep working for one release with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from stageline.errors import ModelError
from stageline.options import Options
from stageline.schedules.build import build_schedule

Method = TypeVar("Method", bound=Callable[..., None])

RENAMED = {
    "sample": "example_inputs",
    "optimizer": "optimizer_fn",
    "scheduler": "scheduler_fn",
    "init": "init_fn",
}
GROUPED = tuple(field.name for field in fields(Options))
DIRECT = ("opaque", "cut_at")  # options that are not deprecated as arguments
OF_SCHEDULE = ("vertical_sync", "replicas")


def accepts_deprecated(init: Method) -> Method:
    """Let `Pipeline` accept the arguments of version 0.1, with a warning for each."""

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **current_arguments(given))

    return accept  # type: ignore[return-value]  # it has the signature of what it wraps


def current_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under their current names."""
    found = dict(given)
    for old, new in RENAMED.items():
        if old in found:
            _warn(old, f"{new}=…")
            if new in found:
                raise ModelError(f"{old} and {new} were both given, but are the same: omit {old}")
            found[new] = found.pop(old)
    grouped = {name: found.pop(name) for name in GROUPED if name in found}
    if grouped:
        for name in grouped.keys() - set(DIRECT):
            _warn(name, f"options=sl.Options({name}=…)")
        found["options"] = replace(found.get("options", Options()), **grouped)
    of_schedule = {name: found.pop(name) for name in OF_SCHEDULE if name in found}
    if of_schedule:
        for name in of_schedule:
            _warn(name, f"schedule=sl.build_schedule(…, {name}=…)")
        found["schedule"] = _built(found, of_schedule)
    return found


def _built(given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    schedule = given.get("schedule", "1f1b")
    if not isinstance(schedule, str):
        raise ModelError(
            f"{' and '.join(options)} was given beside a schedule that is built already: give it "
            "to build_schedule"
        )
    sizes = {name: given[name] for name in ("num_ranks", "num_microbatches") if name in given}
    return build_schedule(schedule, **sizes, **options)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old}= of Pipeline is deprecated, and will go with the next release: write {new}",
        DeprecationWarning,
        stacklevel=4,
    )
