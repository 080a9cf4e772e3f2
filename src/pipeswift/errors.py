"""The one family of errors that is the user's to fix; the command line prints their text and no traceback."""


class PipeSwiftError(Exception):
    """Something the user gave does not fit. The text names the setting, the value, the rule and a way out."""
