"""Run the `stageline` command in this process."""

from __future__ import annotations

import pytest

from stageline.cli import main


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, output and errors of one command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["stageline", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
    out, err = capsys.readouterr()
    code = stop.value.code
    assert isinstance(code, int)
    return code, out, err
