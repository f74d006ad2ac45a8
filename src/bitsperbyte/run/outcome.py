"""How a run ends other than well: the exceptions that carry an exit code, and the codes themselves."""

EXIT_OK = 0
EXIT_FAILED = 1  # the run diverged, ended over the cap or crashed
EXIT_USAGE = 2  # bad input: an option, a config, a file
EXIT_SYSTEM = 3  # the disk or the operating system refused
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away
EXIT_TERMINATED = 143  # 128 + SIGTERM


class RunFailed(Exception):
    """A run that ended as `status` (diverged, over_cap, interrupted, crashed); its folder keeps everything so far.

    `code` is the exit code of the process.
    """

    def __init__(self, message: str, code: int = EXIT_FAILED, status: str = "crashed") -> None:
        super().__init__(message)
        self.code, self.status = code, status


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where it arrives, so that it unwinds the stack (and closes files) exactly as Ctrl-C does."""
