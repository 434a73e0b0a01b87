"""What can go wrong, by kind. Every message says what came, what was wanted and what to do."""


class UnstrideError(Exception):
    """Base of every error that unstride raises on purpose."""


class OptionError(UnstrideError, ValueError):
    """An option has a value that it cannot have."""


class InputError(UnstrideError, ValueError):
    """An image tensor of the wrong shape, size, dtype or device."""


class CaptureError(UnstrideError):
    """The model cannot be turned into a graph, or the graph does not compute what the model computes."""


class ModelRaised(CaptureError):
    """The model itself raised on the example: a wrong size, number of channels, dtype or device."""


class ModelChanged(UnstrideError):
    """The model was changed where its user had said that it stays as it is."""


class NothingToSubsample(UnstrideError):
    """No strided layer of the model has states. Views, gates and several networks still work."""


class SpecError(UnstrideError, ValueError):
    """A model or data specification that cannot be understood or found."""


class DataError(UnstrideError):
    """A data set, image or label file that is missing, damaged or inconsistent."""


class ArtefactError(UnstrideError):
    """A saved file that is damaged, foreign, or made for another model."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device; torch says so in several ways."""
    text = str(error).lower()
    words = ("out of memory", "allocate memory", "defaultcpuallocator")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in text for w in words))


class UnstrideWarning(UserWarning):
    """The answer is there, but something about it should be known."""


class TaskAssumed(UnstrideWarning):
    """Neither the user nor the model's library said what the output means; `assumption` says what it is taken for."""

    def __init__(self, assumption: str) -> None:
        super().__init__(f"{assumption}. Pass task=... to change that.")
        self.assumption = assumption


class Inconclusive(UnstrideWarning):
    """A recipe that is used, though its own file says that no gain was shown."""


class LeftOut(UnstrideWarning):
    """The answer is there, but not all of the data is in it."""


class PreprocessAssumed(UnstrideWarning):
    """A file's function returned a module alone; the warning says how its images are prepared."""


class LessAtOnce(UnstrideWarning):
    """A device was out of memory, so fewer images run together."""


class NotWritten(UnstrideWarning):
    """The answer is there, but an image or a page of it could not be written."""
