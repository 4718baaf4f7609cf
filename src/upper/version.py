"""The version of the project, in its only place: packaging and `upper --version` both read it here."""

from typing import Final

VERSION: Final = "0.1.0"
