"""The one error tree of pdserve, and the one table from an error to its HTTP answer.

Every error that may reach a user is a `PdserveError`. A layer raises the narrowest class it can name;
`http/` and the metrics read `status`, `code`, `kind`, `retryable` and nothing else. Messages name the
field, the value and the limit.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of every error pdserve raises on purpose.

    `status`: the HTTP status it is answered with. `code`: a stable machine-readable word (the `code` of an
    OpenAI error body and the label of `pdserve:request_errors_total`). `kind`: OpenAI's `type`.
    """

    status: int = 500
    code: str = "internal_error"
    kind: str = "server_error"
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class ClientError(PdserveError):
    """The request is wrong; sending it again changes nothing."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class ContextLengthExceeded(ClientError):
    """Prompt plus requested output does not fit the model length or either side's capacity."""

    code = "context_length_exceeded"


class Unauthorized(ClientError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class NotFound(ClientError):
    """Unknown model or route."""

    status = 404
    code = "not_found"
    kind = "not_found_error"


class ModelNotFound(NotFound):
    """No model of that name is served here."""

    code = "model_not_found"


class WrongRole(NotFound):
    """A prefill node generates nothing."""

    code = "wrong_role"


class UnsupportedMediaType(ClientError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class BodyTimeout(ClientError):
    """The client did not send its body in time."""

    status = 408
    code = "body_timeout"


class MethodNotAllowed(ClientError):
    status = 405
    code = "method_not_allowed"


class RequestTooLarge(ClientError):
    """The body is larger than the server reads."""

    status = 413
    code = "request_too_large"


class Overloaded(PdserveError):
    """A bounded queue is full or no peer can take work now; `retry_after` says when to come back."""

    status = 503
    code = "overloaded"
    kind = "service_unavailable_error"
    retryable = True


class NoPeer(Overloaded):
    """No prefill node is reachable."""

    code = "no_prefill_peer"


class Draining(Overloaded):
    """The node is shutting down and takes no new work."""

    code = "draining"


class PeerError(PdserveError):
    """Another node failed, refused, or broke the protocol."""

    status = 502
    code = "peer_error"
    retryable = True


class PeerLost(PeerError):
    """The prefill node of a request died, went silent or restarted before its cache had arrived."""

    code = "prefill_peer_lost"


class HelloRefused(PeerError):
    """Two nodes do not fit together; the message names both values."""

    code = "hello_refused"


class ProtocolError(PeerError):
    """A peer sent what the protocol does not allow."""

    code = "protocol_error"


class FabricError(PdserveError):
    """libfabric refused or lost an operation; `name` is libfabric's own (`FI_EAGAIN`)."""

    code = "fabric_error"

    def __init__(self, message: str, *, name: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.name = name
        self.errno = errno


class WorkerError(PdserveError):
    """A rank's process died, stalled or ran out of memory."""

    code = "worker_failed"
    retryable = True


class InternalError(PdserveError):
    """A bug, or an end of the server that is not the request's doing; the log has the details."""


class ConfigError(PdserveError):
    """A configuration value is unknown, of the wrong type, or out of range."""

    code = "bad_config"


class ModelError(PdserveError):
    """A model directory cannot be loaded; the message names file, tensor, expected and found."""

    code = "bad_model"
