import os

from bitsperbyte.run.console import SteadyConsole


def test_a_reader_that_goes_away_does_not_end_the_writer() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as closed:
        console = SteadyConsole(file=closed, force_terminal=False)
        console.print("nobody reads this")
        console.print("nor this")
        assert console.quiet
