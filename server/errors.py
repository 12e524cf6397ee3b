"""The errors of the service itself; what a client gets wrong is answered by vLLM's own handlers."""

from magi_serve.errors import MagiServeError


class ServeError(MagiServeError):
    """The service cannot start as asked; the message has the reasons and the way out."""
