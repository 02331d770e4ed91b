"""What all commands share: flags, the config file, and how mistakes are told.

A command is a module with `define_flags(fv)` and `main(fv)` that ends in
`cli.run(main, define_flags)`. Its flags live in a FlagValues of their own, so that importing two
commands never makes them collide.
"""

import ast
import contextlib
import difflib
import errno
import io
import logging
import os
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags
from ml_collections import ConfigDict, FieldReference, FrozenConfigDict

from fixbin_jax.errors import CommandError, UserError


def run(
    main: Callable[[flags.FlagValues], int | None],
    define_flags: Callable[[flags.FlagValues], None],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parses the command line, calls `main` and exits.

    The status is what `main` returns (None is 0), that of a CommandError (2 for a UserError), 2
    after an OSError about a file, 130 after Ctrl-C; one line on standard error says what and where.
    Any other exception is a bug and passes through.

    Args:
      main: gets the parsed flags.
      define_flags: defines flags with `flag_values=` the FlagValues it is given.
      argv: program name and arguments; sys.argv if None.
    """
    # Text that the terminal's encoding lacks is still shown, spelt out.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _warnings_on_stderr():
        status = _status(main, define_flags, list(sys.argv if argv is None else argv))
    sys.exit(status)


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Our own log is told the way mistakes are, whatever a library does to the root logger."""
    log = logging.getLogger("fixbin_jax")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    before = log.propagate
    log.addHandler(handler)
    log.propagate = False
    # orbax logs the traceback of a save that fails; a CommandError tells of it in one line.
    absl_log = logging.getLogger("absl")
    absl_log.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        absl_log.removeFilter(_has_no_traceback)
        log.propagate = before
        log.removeHandler(handler)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def define_config(fv: flags.FlagValues) -> None:
    """Defines the required flag --config and, under it, --config.KEY=VALUE for every key."""
    flags.DEFINE_flag(_ConfigFlag(), fv, required=True)


def get_config(fv: flags.FlagValues) -> ConfigDict:
    """The config that --config names, with all --config.KEY=VALUE applied, locked.

    Raises:
      UserError: see `load_config`.
    """
    flag = fv["config"]
    assert isinstance(flag, _ConfigFlag)
    return load_config(str(flag.value), flag.overrides)


def load_config(path: str, overrides: Iterable[tuple[str, str | None]] = ()) -> ConfigDict:
    """The ConfigDict that get_config() in the file `path` returns, changed and locked.

    ml_collections' own config flag is not used: it loads files by an importlib call that Python
    3.15 drops, cannot set a value back to None, and lets several mistakes end in a traceback.

    Args:
      path: a Python file.
      overrides: dotted key and the value's text. The text is read by the type that the key has:
        `1e3` is an integer where it is whole, `4,2` a tuple, `none` is None where the config holds
        a placeholder or None. A text of None stands for a key without a value: true for a boolean.

    Raises:
      UserError: the file is missing or broken, a key is unknown, a value does not fit its key.
    """
    where = f"--config={path}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{where}: no such file")
    try:
        function = runpy.run_path(str(file)).get("get_config")
        config = function() if callable(function) else None
    except Exception as error:
        raise UserError(f"{where}: {_cause(error, file)}") from error
    if not callable(function):
        raise UserError(f"{where}: the file defines no function get_config()")
    if not isinstance(config, ConfigDict) or isinstance(config, FrozenConfigDict):
        raise UserError(
            f"{where}: get_config() returned {type(config).__name__}, expected ConfigDict"
        )
    config.lock()
    for key, text in overrides:
        _override(config, key, text)
    return config


class _ConfigFlag(flags.Flag):
    """--config, which also keeps the (key, text) pairs of --config.KEY=VALUE."""

    def __init__(self) -> None:
        super().__init__(
            parser=flags.ArgumentParser(),
            serializer=None,
            name="config",
            default=None,
            help_string="Python file whose get_config() returns the configuration; "
            "--config.KEY=VALUE changes a key of it, as in --config.model.num_layers=4",
        )
        self.overrides: list[tuple[str, str | None]] = []


def _status(
    main: Callable[[flags.FlagValues], int | None],
    define_flags: Callable[[flags.FlagValues], None],
    argv: list[str],
) -> int:
    try:
        fv = flags.FlagValues()
        define_flags(fv)
        if not {"--help", "-help", "-h"}.isdisjoint(argv[1:]):
            print(_usage(main, fv, argv[0]))
            status = 0
        else:
            _parse(fv, argv)
            status = main(fv) or 0
        print(end="", flush=True)
        return status
    except CommandError as error:
        return _fail(str(error), error.status, error.label)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Of all pipes only that of standard output may break without being a bug.
        if not _drop_broken_stdout(probe="\n"):
            raise
        return 1
    except OSError as error:
        # A write that finds the disk full does not know its file's name.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        unnamed = "standard output" if _drop_broken_stdout(probe="") else "writing a file"
        return _fail(f"{error.filename or unnamed}: {error.strerror}")


def _fail(message: str, status: int = UserError.status, label: str = UserError.label) -> int:
    print(f"{label}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _drop_broken_stdout(probe: str) -> bool:
    """Whether standard output takes no more text; what it still holds then goes nowhere."""
    try:
        print(end=probe, flush=True)
    except OSError:
        # The interpreter flushes once more on its way out and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _parse(fv: flags.FlagValues, argv: list[str]) -> None:
    if "config" in fv and isinstance(fv["config"], _ConfigFlag):
        argv = _take_overrides(argv, fv["config"].overrides)
    fv.set_gnu_getopt(True)
    try:
        _, *positional = fv(argv)
    except flags.UnrecognizedFlagError as error:
        raise UserError(_unknown("flag", "--", error.flagname, [*fv, "help"])) from None
    except flags.IllegalFlagValueError as error:
        raise UserError(_refusal(fv, error)) from None
    except (flags.Error, ValueError) as error:
        raise UserError(str(error)) from None
    if positional:
        raise UserError(f"{positional[0]!r}: unexpected; arguments are written --name=value")


def _take_overrides(argv: list[str], overrides: list[tuple[str, str | None]]) -> list[str]:
    """Moves --config.KEY=VALUE, --config.KEY VALUE and --config.KEY into `overrides`."""
    rest = []
    while argv:
        arg, *argv = argv
        match = re.fullmatch(r"--?config\.([^=]*)(?:=(.*))?", arg, re.DOTALL)
        if match is None:
            rest.append(arg)
            continue
        key, text = match.groups()
        if text is None and argv and not argv[0].startswith("--"):
            text, *argv = argv
        overrides.append((key, text))
    return rest


def _refusal(fv: flags.FlagValues, error: flags.IllegalFlagValueError) -> str:
    """One line about a value that absl refused."""
    cause = error.__context__
    if cause is not None:
        given = str(error).removeprefix("flag ").removesuffix(f": {cause}")
        flag = fv[given.removeprefix("--").partition("=")[0]]
        expected = "true or false" if flag.boolean else flag.parser.syntactic_help
        return f"{given}: expected {expected}" if expected else f"{given}: {cause}"
    missing = [f"--{name}" for name in fv if fv[name].value is None and _is_required(fv[name])]
    return f"{', '.join(missing)}: required, but not given" if missing else str(error)


def _is_required(flag: flags.Flag) -> bool:
    return any("must have a value other than None" in v.message for v in flag.validators)


def _usage(main: Callable[..., Any], fv: flags.FlagValues, program: str) -> str:
    module = sys.modules[main.__module__]
    if module.__spec__ is not None:
        program = "-m " + module.__spec__.name.removesuffix(".__main__")
    lines = [f"usage: python {program} --name=value ...", ""]
    if module.__doc__:
        lines += [module.__doc__.strip().partition("\n\n")[0], ""]
    texts = {name: _help(fv[name]) for name in fv} | {"help": "show this text"}
    width = max(map(len, texts)) + 6
    for name, text in texts.items():
        first, *more = textwrap.wrap(text, 96 - width)
        lines.append(f"  --{name}".ljust(width) + first)
        lines += [" " * width + line for line in more]
    return "\n".join(lines)


def _help(flag: flags.Flag) -> str:
    text = " ".join(flag.help.split())
    if _is_required(flag):
        return f"{text} (required)"
    if flag.default is None or flag.default is False:
        return text
    return f"{text} (default: {flag.default})"


def _cause(error: Exception, file: Path) -> str:
    """What was raised, and the line of `file` that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if frame.filename == str(file)]
    line = f"line {numbers[-1]}: " if numbers else ""
    return f"{line}{type(error).__name__}: {error}"


def _override(config: ConfigDict, key: str, text: str | None) -> None:
    """Sets one key of `config` in place from a value's text."""
    flag = f"--config.{key}"
    *groups, leaf = key.split(".")
    holder = config
    for group in groups:
        holder = holder[group] if isinstance(holder, ConfigDict) and group in holder else None
    if not isinstance(holder, ConfigDict) or leaf not in holder:
        raise UserError(_unknown("key", "--config.", key, _keys(config)))
    current, kind = holder[leaf], holder.get_type(leaf)
    if isinstance(current, ConfigDict):
        raise UserError(f"{flag}: a group, set one of its keys: {', '.join(_keys(current))}")
    if text is None:
        if kind is not bool:
            raise UserError(f"{flag}: no value; write {flag}=VALUE")
        text = "true"
    stored = dict(holder.items(preserve_field_references=True))[leaf]
    if text.lower() == "none" and (stored is None or isinstance(stored, FieldReference)):
        holder[leaf] = None
        return
    try:
        holder[leaf] = _value(text, kind, current)
    except ValueError as error:
        raise UserError(f"{flag}={text}: expected {error}") from None


def _keys(config: ConfigDict) -> Iterator[str]:
    """Dotted keys of all values."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from (f"{key}.{rest}" for rest in _keys(value))
        else:
            yield key


def _unknown(kind: str, prefix: str, name: str, names: Iterable[str]) -> str:
    """One line that offers the name most like `name`; the part after the last dot counts twice."""

    def likeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, name, other).ratio()
        last = difflib.SequenceMatcher(None, name.split(".")[-1], other.split(".")[-1]).ratio()
        return whole + last

    nearest = max(names, key=likeness, default=None)
    hint = "" if nearest is None else f"; did you mean {prefix}{nearest}?"
    return f"{prefix}{name}: no such {kind}{hint}"


def _value(text: str, kind: type, current: Any) -> Any:
    """The value of type `kind` that `text` spells.

    Raises:
      ValueError: it spells none; the message is what was expected.
    """
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError("true or false")
        return text.lower() in ("true", "1")
    if kind is int:
        return _integer(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError("a number") from None
    if kind in (tuple, list):
        return kind(_elements(text, current or ()))
    if kind is type(None):
        return _literal(text)
    raise ValueError(f"{kind.__name__}, which cannot be set here")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise ValueError("an integer") from None
    if not number.is_integer():
        raise ValueError("an integer")
    return int(number)


def _elements(text: str, current: Sequence[Any]) -> list[Any]:
    """Elements of a sequence, as a Python literal or bare words between commas."""
    value = _literal(text)
    if isinstance(value, str):
        inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
        value = [word.strip() for word in inner.split(",") if word.strip()]
    if not isinstance(value, tuple | list):
        value = [value]
    kinds = {type(element) for element in current}
    if len(kinds) == 1 and (kind := kinds.pop()) in (str, bool, int, float):
        return [_value(str(element), kind, None) for element in value]
    return list(value)


def _literal(text: str) -> Any:
    """The Python literal that `text` is, or else `text`."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
