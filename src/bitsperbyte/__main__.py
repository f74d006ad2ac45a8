"""Entry of `bpb` and `python -m bitsperbyte`: run a command, turn how it ends into one line and a documented exit code.

0 done | 1 the run failed (diverged, over the cap, crashed) | 2 bad input | 3 the disk or the system refused | 130
interrupted (Ctrl-C) | 141 the reader of the output went away | 143 terminated (SIGTERM)
"""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import typer

from bitsperbyte.run.outcome import (
    EXIT_BROKEN_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SYSTEM,
    EXIT_TERMINATED,
    EXIT_USAGE,
    RunFailed,
    Terminated,
)

COMMAND_LINE_ERROR = typer.BadParameter.__mro__[2]  # ClickException, wherever this version of typer keeps it
BUG = "this is a bug in bitsperbyte; the run folder is intact and can be resumed"


def main() -> None:
    """Run the command in sys.argv and exit with its code."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(guarded(lambda: run_command(sys.argv[1:])))


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run one command; every error passes through to the caller."""
    from bitsperbyte.cli import app

    command = typer.main.get_command(app)
    # not command.main(): it would answer Ctrl-C, closed pipes and exits itself, with codes of its own
    with command.make_context("bpb", list(arguments)) as context:
        command.invoke(context)
    return EXIT_OK


def guarded(command: Callable[[], int]) -> int:
    """The exit code of `command`; errors go to stderr as one line, after a traceback where the fault is ours."""
    try:
        code = _answered(command)
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's last flush would fail again
        return EXIT_BROKEN_PIPE


def _answered(command: Callable[[], int]) -> int:
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command()
    except typer.Exit as ended:
        return ended.exit_code
    except COMMAND_LINE_ERROR as error:
        return _usage(error)
    except RunFailed as failure:
        return _say(str(failure), failure.code)
    except Terminated:
        return _say("terminated; everything so far is kept", EXIT_TERMINATED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted; everything so far is kept", EXIT_INTERRUPTED)
    except BrokenPipeError:
        raise
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        return _say(_one_line(error), EXIT_USAGE)
    except OSError as error:
        return _say(_one_line(error), EXIT_SYSTEM)
    except Exception:
        traceback.print_exc()
        return _say(BUG, EXIT_FAILED)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _show_warning(message: Warning | str, *_where: Any) -> None:
    print(f"bpb: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _say(text: str, code: int) -> int:
    print(f"bpb: {text}", file=sys.stderr)
    return code


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    text = error.format_message()
    if context is None:
        return _say(" ".join(text.split()), EXIT_USAGE)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)  # the help of a group called without a subcommand
        return EXIT_USAGE
    return _say(f"{' '.join(text.split())} (see `{context.command_path} --help`)", EXIT_USAGE)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{error.strerror}: {names}" if names else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()
