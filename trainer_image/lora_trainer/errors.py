"""What can end a start, by whose business it is. `endings.word_of` gives each its reserved exit code."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """The configuration asks for something impossible; the message names the field."""


class DataError(ValueError):
    """The training data can't be used; the message names the file or folder."""


class CheckpointIntegrityError(Exception):
    """Checkpoints were committed, but none of them can be trusted; the message lists them."""


class FencedError(Exception):
    """A newer start has claimed the run directory; this one must not write any more."""


class NotFiniteError(Exception):
    """The loss was not finite for too many steps in a row."""


class TransientError(Exception):
    """Something outside failed that may work at the next try."""
