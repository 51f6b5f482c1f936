"""Takes the HTTP server's own errors into the proxy's log."""

import logging

from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent


class ServerErrors(logging.Handler):
    """Errors of the server itself, without their text, which may hold parts of a request.

    What clients send wrongly is no error of ours: the server tells them, and that is all.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.ERROR)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            self._log.error(LogEvent.INTERNAL_ERROR, where="http server")
        else:
            self._log.exception(LogEvent.INTERNAL_ERROR, error, where="http server")


def server_logger(log: Log) -> logging.Logger:
    """A logger of its own, which hands nothing on to other loggers."""
    logger = logging.Logger("tidegate.http", logging.ERROR)
    logger.addHandler(ServerErrors(log))
    return logger
