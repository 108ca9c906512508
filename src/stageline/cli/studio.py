"""`stageline studio`: schedules, plans and runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.errors import ReportError

RunsFolder = Annotated[
    Path, typer.Option(help="Folder whose runs are shown: run folders of sl.fit are in it.")
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 is any that is free.")
]


def studio(runs: RunsFolder = Path(), port: Port = 0) -> None:
    """Explore schedules, plans and runs in the browser.

    [dim]stageline studio --runs runs[/dim]

    Open the printed address in a browser on this machine. Its token keeps other
    users out, so do not share it. Ctrl-C ends the studio.

    On another machine, such as a cluster's login node, start it there and forward
    its port:

    [dim]stageline studio --port 8765[/dim]

    [dim]ssh -L 8765:127.0.0.1:8765 login-node[/dim]
    """
    try:
        from stageline.studio.serve import Studio  # noqa: PLC0415  starlette is optional
    except ModuleNotFoundError as error:
        raise ReportError(
            f"the studio needs {error.name}, which is not installed: "
            "pip install 'stageline[studio]'"
        ) from None
    if not runs.is_dir():
        raise ReportError(f"--runs is {str(runs)!r}, which is not a folder: use one that exists")
    running = Studio(runs, port)
    typer.echo(f"studio: {running.address}")
    typer.echo("Ctrl-C ends it", err=True)
    try:
        running.run()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
