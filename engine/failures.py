"""Why a worker cannot go on. Each text is for the operator."""


class WorkerFailure(Exception):
    """Base of what ends a worker other than a signal or a bug."""


class WorkerRejected(WorkerFailure):
    """The scheduler does not want this worker; the text is its reason."""


class LinkBroken(WorkerFailure):
    """The scheduler is gone, or sent what cannot be; going on could corrupt pages."""


class DeviceLost(WorkerFailure):
    """The accelerator does not answer any more; only a new process can use it."""
