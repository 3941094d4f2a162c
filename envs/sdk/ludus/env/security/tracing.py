"""Trace context and request ids: what joins the spans and log lines of one call.

    caller's span, request_id(...) --call.trace or headers--> gateway --> server --> worker
                                                          server_span(...) at each stop

A process needs nothing but the OpenTelemetry API for this; whether spans are recorded is
decided where a tracer provider is installed. Where the caller has neither span nor request
id, a call carries nothing and pays two look-ups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ludus.proto.env.v1 import env_pb2 as pb

TRACEPARENT = "traceparent"
"""Header and metadata key of W3C's trace context."""
REQUEST_ID = "x-request-id"
"""Header and metadata key of the request id."""
MAX_REQUEST_ID_CHARS = 128

_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
_request_id: ContextVar[str] = ContextVar("ludus_request_id", default="")
_propagator = TraceContextTextMapPropagator()


@contextmanager
def request_id(value: str) -> Iterator[None]:
    """Calls made inside carry this request id, through gateways and servers.

    It travels in headers and stands in logs: what is not printable ASCII is left out.
    """
    token = _request_id.set(_UNPRINTABLE.sub("", value[:MAX_REQUEST_ID_CHARS]))
    try:
        yield
    finally:
        _request_id.reset(token)


def current_request_id() -> str:
    """The request id of the call being made or served; empty when it has none."""
    return _request_id.get()


def current_traceparent() -> str:
    """The current span in W3C's form; empty when there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(TRACEPARENT, "")


def is_traced() -> bool:
    """False when a call has surely nothing to carry; costs about 0.1 microseconds."""
    return bool(_request_id.get() or context.get_current())


def fill_trace(call: pb.Call) -> None:
    """Write the current span and request id into a call that is about to be sent."""
    traceparent, request = current_traceparent(), _request_id.get()
    if traceparent or request:
        call.trace.traceparent = traceparent
        call.trace.request_id = request


def trace_headers() -> dict[str, str]:
    """The current span and request id as headers; empty when there are none."""
    if not is_traced():
        return {}
    headers = {TRACEPARENT: current_traceparent(), REQUEST_ID: _request_id.get()}
    return {name: value for name, value in headers.items() if value}


@contextmanager
def server_span(name: str, traceparent: str, request: str = "") -> Iterator[None]:
    """A span that continues the caller's; nothing where neither argument is given."""
    if not traceparent and not request:
        yield
        return
    with request_id(request or current_request_id()):
        if not traceparent:
            yield
            return
        parent = _propagator.extract({TRACEPARENT: traceparent})
        tracer = trace.get_tracer("ludus.env")
        with tracer.start_as_current_span(name, parent, kind=trace.SpanKind.SERVER):
            yield
