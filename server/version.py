"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("polydraft")
except PackageNotFoundError:  # run from a checkout that is not installed
    VERSION = "0+unknown"
