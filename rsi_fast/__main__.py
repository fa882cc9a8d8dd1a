"""Entry of the command: names what to install when one of its libraries is missing."""

import sys

EVERYTHING = "pip install 'rsi-fast[train,rollout,sandbox,cpu]' (cuda in place of cpu on a machine with GPUs)"


def main() -> None:
    try:
        from rsi_fast.cli import main as command

        command()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("rsi_fast", "rsi_kernels"):
            raise
        sys.exit(
            f"error: the Python package {error.name} is not installed. The command line needs "
            f"pip install 'rsi-fast[cli]', a whole run needs {EVERYTHING}"
        )


if __name__ == "__main__":
    main()
