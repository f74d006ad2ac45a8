"""A lab for two speedruns of language models, both scored in bits per byte."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bitsperbyte")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+uninstalled"
