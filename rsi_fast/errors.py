"""The one exception that ends a command with a message for a person, not a traceback."""

from pathlib import Path


class UserError(Exception):
    """Something the user can mend. The message names the thing, what was expected and what to do next."""


def leave_error(run_dir: Path, process: str, message: str) -> None:
    """Leaves a process's last words where the launcher finds them."""
    (Path(run_dir) / "logs" / f"{process}.error").write_text(message)
