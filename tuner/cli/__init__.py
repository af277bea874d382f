"""The `zerotune` command: each subcommand parses its options, calls one function and prints the result.

Each command has a module; large packages are imported inside the commands, so that `zerotune --help` answers at once.
Exit codes: 0 success, 1 failure, 2 a mistake of the user (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from typing import Any, Final

from ...agent.daemon_link.least_free import refuse_few_threads
from ...store.errors import UserError, ZerotuneError, printable
from .renamed import renamed
from .terminal import filtered_output, forget_absurd_size, shortened

_SERVING: Final = {("daemon", "metrics"), ("status", "--web")}


def _ignored(words: list[str]) -> tuple[signal.Signals, ...]:
    """Signals that this command ignores, since batch systems send them to all processes of a job for the training.

    A command that a person watches ends with its terminal; a daemon does not.
    """
    if any(first in words[:1] and second in words for first, second in _SERVING):
        return (signal.SIGUSR1, signal.SIGUSR2)
    return (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP) if _is_daemon(words) else ()


def _is_daemon(words: list[str]) -> bool:
    """Whether these words run a daemon: an option follows `daemon`, not a subcommand."""
    return words[:1] == ["daemon"] and all(word.startswith("-") for word in words[1:2])


def main() -> None:
    """Entry point of the console script: every failure is one line on stderr and an exit code, never a traceback."""
    words, message = renamed(sys.argv[1:])
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    sys.argv[1:] = words
    if message:
        print(f"zerotune: {shortened(message)}", file=sys.stderr)
    for number in _ignored(words):
        signal.signal(number, signal.SIG_IGN)
    # If the home folder cannot be written, matplotlib logs many lines about its font cache.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    forget_absurd_size()
    with filtered_output(), _ended_in_good_order() if _is_daemon(words) else contextlib.nullcontext():
        _run()


@contextlib.contextmanager
def _ended_in_good_order() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C exit with 0 while a daemon loads, which takes seconds."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: sys.exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _asked(words: list[str]) -> str | None:
    """The command whose options are needed; None: those of all commands may be."""
    if any(name.endswith("_COMPLETE") for name in os.environ):
        return None
    return next((word for word in words if not word.startswith("-")), "")


def _run() -> None:
    try:
        from .app import command_line, help_of  # imported here so that Ctrl-C is handled while it loads

        _refuse_empty(sys.argv[1:])
        if sys.argv[1:] and sys.argv[-1] in ("-h", "--help") and (text := help_of(sys.argv[1:-1])) is not None:
            print(text)
            sys.exit()
        code = command_line(_asked(sys.argv[1:]))(prog_name="zerotune", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as ended:  # a signal ended a daemon while it loads
        code = _few_threads() or ended.code
    except UserError as error:
        code = _failed(str(error), 2)
    except ZerotuneError as error:
        code = _failed(str(error), 1)
    except sqlite3.DatabaseError as error:
        from ...store.sqlite.damage.damage import remedy
        from .paths import store_in_use

        reason, path = " ".join(str(error).split()), store_in_use(sys.argv[1:])
        words = f"the store {path} is damaged ({reason}); {remedy(path)}"
        if isinstance(error, sqlite3.OperationalError):
            what_to_do = "look whether its disk is full or cannot be read, and what else has it open"
            words = f"the store {path} cannot be used ({reason}); {what_to_do}"
        code = _failed(words, 2)
    except UnicodeEncodeError as error:  # a path may have any bytes
        words = printable(error.object)
        code = _failed(f"{words!r} is no {error.encoding.upper()}; give paths of {error.encoding.upper()}", 2)
    except MemoryError:
        code = _failed("there is not enough memory; give it more (`ulimit -v`, the batch system's limit)", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the output has left
        code = 0
    except OSError as error:
        if not error.filename and error.errno in _NO_ROOM and (output := _output_file()):
            error.filename = output  # for other files, the code that writes them adds the name
        where = f" {error.filename}" if error.filename else ""
        code = _failed(f"cannot use{where}: {error.strerror or error}; check the path, its permissions and its disk", 2)
    except Exception as error:
        code = _of_typer(error) or _few_threads()
        if code is None:
            raise
    if code == 130:
        code = _few_threads() or code
    sys.exit(code if isinstance(code, int) else 0)


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def _output_file() -> str:
    """The file that the output goes to; empty if it is a pipe or a terminal."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if os.path.exists(path) and not os.isatty(1):
            return path
    return ""


def _refuse_empty(words: list[str]) -> None:
    """Refuse empty values, mostly of unset variables: one would mean the current folder, or nothing.

    Words after `--` belong to the training command.
    """
    if "--" in words:
        words = words[: words.index("--")]
    elif words[:1] == ["launch"]:
        return
    for at, word in enumerate(words):
        if not word.strip() or (word.startswith("--") and word.endswith("=")):
            before = word if word.startswith("--") else words[at - 1] if at else ""
            what = f"the value of {before.rstrip('=')}" if before.startswith("--") else "an argument"
            raise UserError(f"{what} is empty", "give one, or leave it out")


def _failed(words: str, code: int) -> int:
    print(f"zerotune: {shortened(words)}", file=sys.stderr)
    return code


def _few_threads() -> int | None:
    """The exit code if no threads can be started: OpenBLAS then interrupts its own process, as Ctrl-C would."""
    try:
        refuse_few_threads()
    except UserError as error:
        return _failed(str(error), 2)
    return None


def _of_typer(error: Exception) -> int | None:
    """The exit code of an exception of typer; None for other exceptions."""
    import typer

    if isinstance(error, typer.Abort):
        return 130
    usage_error: Any = typer.BadParameter.__base__  # UsageError of the copy of click that this typer uses
    return _explain_usage(error) if isinstance(error, usage_error) else None


def _explain_usage(error: Any) -> int:
    """Print wrong options on one line; print the help of a command without any."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    path = error.ctx.command_path if error.ctx is not None else "zerotune"
    problem = _of_value(error) or " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    kind = type(error).__name__
    if path.endswith(" launch") and "--" not in sys.argv and kind == "NoSuchOption":
        return _failed(f"{problem}; put `--` before the training command, or see `{path} --help`", 2)
    if path.endswith(" launch") and kind == "MissingParameter":
        return _failed(f"{problem}; for example `{path} -- torchrun train.py`, see `{path} --help`", 2)
    return _failed(f"{problem} See `{path} --help`" if problem.endswith("?") else f"{problem}; see `{path} --help`", 2)


def _of_value(error: Any) -> str:
    """The refused value and its remedy; empty if the message is not pydantic's."""
    errors = getattr(error.__cause__, "errors", None)
    if not callable(errors):
        return ""
    found = errors()[0]
    kind, value, limits = str(found["type"]), found["input"], found.get("ctx", {})
    name = error.param.opts[0] if error.param is not None else "the value"
    if "ge" in limits:
        return f"{name} {value} is too small; give {limits['ge']:g} or more"
    if "le" in limits:
        return f"{name} {value} is too large; give {limits['le']:g} or less"
    if kind.startswith("bool"):
        return f"{name} is {value!r} in the environment ({error.param.envvar}); give 1 or 0"
    if kind.partition("_")[0] in ("int", "float"):
        return f"{name} {value!r} is no {'whole ' if kind.startswith('int') else ''}number; give one, such as 1"
    return ""
