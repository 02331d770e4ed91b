"""What a command reports in one line instead of a traceback."""


class CommandError(Exception):
    """Ends a command: its message is one line on standard error after the word `label`.

    `status` is the exit status.
    """

    label = "error"
    status = 1


class UserError(CommandError, ValueError):
    """A mistake in a flag, file, config key or tensor.

    The message says what is at fault, what was found and what was expected.
    """

    status = 2


class Diverged(CommandError):
    """The loss or the gradient is no longer finite."""


class Terminated(CommandError):
    """Asked to stop by SIGTERM; the state is saved. The status tells a scheduler to start again."""

    label = "stopped"
    status = 128 + 15
