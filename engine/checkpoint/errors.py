"""The one error that reading a checkpoint raises."""


class CheckpointError(Exception):
    """The model cannot be read or is not supported. The text is for the operator.

    It names the file or setting, what is wrong with it and, where that helps, what would be
    right.
    """
