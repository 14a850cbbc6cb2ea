"""What can be wrong with what the user gave us. Messages say what, where, and the way out."""


class UnityError(Exception):
    """The base of every error that unity raises on purpose."""


class CaptureError(UnityError):
    """A function or its arguments cannot become a graph."""


class ParallelTypeError(UnityError):
    """A graph whose types do not agree with what its operators can do."""
