"""The `stageline` command: one file per subcommand, with the options they share in `options.py`."""

from stageline.cli.app import main as main
