"""Write reference/command_line.md from the commands themselves: their help, arguments and options.

python docs/commands.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from stageline.cli.app import app

PAGE = Path(__file__).parent / "reference" / "command_line.md"
BEGIN = """# Command line

After this page you can look up every command, argument and option of `stageline`.

```
$ stageline draw gpipe -p 2 -m 2
rank 0 │ F0 F1 .. .. .. B0 B0 B1 B1
rank 1 │ .. F0 F1 B0 B0 B1 B1
…
```

`stageline COMMAND --help` prints the same. Schedules are those of the [gallery](../gallery.md), or
CSV files. `python docs/commands.py` writes this page.
"""


def page() -> str:
    """Return the page, with a section for each command in the order of `stageline --help`."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # a group
    return BEGIN + "".join("\n".join(_section(name, each)) for name, each in commands.items())


def _section(name: str, command: Any) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    yield _markdown(inspect.cleandoc(command.help))
    yield from ("", "| argument or option | default | |", "|---|---|---|")
    for parameter in command.params:
        names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
        yield f"| {names} | {_default(parameter)} | {_markdown(parameter.help)} |"
    yield ""


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value in (None, False, (), "") or callable(value) else f"`{value}`"


def _markdown(text: str) -> str:
    """Return a help text with rich's marks as those of code."""
    return re.sub(r"\[(b|dim)\](.*?)\[/\1\]", r"`\2`", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
