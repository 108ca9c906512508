"""The error of commands and data that cannot work."""


class TranslationError(ValueError):
    """Something that the user can change: the message says what was seen, and what to do."""
