"""Every error a client can meet, with its HTTP status and OpenAI error code; nowhere else says a status."""

from __future__ import annotations


class RouterError(Exception):
    """Base of all errors of this package. `status` and `code` go to the client as they stand."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def body(self) -> dict[str, object]:
        """OpenAI error object: https://platform.openai.com/docs/guides/error-codes."""
        error = {"message": str(self), "type": self.type, "param": None, "code": self.code}
        return {"error": error}


class EventDecodeError(RouterError):
    """A frame on the event stream isn't a batch; the one error the codec raises."""


class InvalidRequest(RouterError):
    """The client's request can't be served as it is; the message says what to change."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt (plus asked output) exceeds what the engines were started with."""

    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The body exceeds the configured limit."""

    status = 413
    code = "request_too_large"


class UnknownModel(RouterError):
    """Neither the served model nor a known adapter."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class UnknownWorker(RouterError):
    """No worker of this name is registered."""

    status = 404
    code = "worker_not_found"
    type = "invalid_request_error"


class Unauthorized(RouterError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    type = "invalid_request_error"


class AdapterRefused(RouterError):
    """A user's wish about adapters can't be met; the message says why. Nothing was changed."""

    status = 400
    code = "adapter_refused"
    type = "invalid_request_error"


class NoCapacity(RouterError):
    """No worker can take the request now."""

    status = 503
    code = "no_worker_available"


class Overloaded(RouterError):
    """More requests than the fleet can take; come back after `retry_after_s`."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class AdapterNotHeld(NoCapacity):
    """The adapter is offered, and no ready worker holds it yet."""

    code = "adapter_loading"


class AdapterUnavailable(NoCapacity):
    """The adapter couldn't be loaded in time, or at all."""

    code = "adapter_unavailable"


class RequestOverdue(RouterError):
    """The request has lived as long as it may; its engine was told to end it."""

    status = 504
    code = "request_timeout"


class UpstreamError(RouterError):
    """The chosen engine failed before it answered."""

    status = 502
    code = "engine_failed"
