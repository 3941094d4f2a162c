"""Trace context and request ids, which connect the spans and log lines of one call.

    caller's span, request_id(...) --call.trace or headers--> gateway --> server --> worker
                                                          open_server_span(...) in each process

Only the OpenTelemetry API is needed. Spans are recorded in processes with a tracer provider.
A call without a span and a request id is sent without a trace; this costs two look-ups.
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
"""Header and metadata key of the W3C trace context."""
REQUEST_ID = "x-request-id"
"""Header and metadata key of the request id."""
MAX_REQUEST_ID_CHARS = 128

_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
_request_id: ContextVar[str] = ContextVar("ludus_request_id", default="")
_propagator = TraceContextTextMapPropagator()


@contextmanager
def request_id(new_id: str) -> Iterator[None]:
    """Attach a request id to all calls inside, through gateways and servers.

    The id travels in headers and appears in logs, so characters that are not printable ASCII
    are removed.
    """
    reset_token = _request_id.set(_UNPRINTABLE.sub("", new_id[:MAX_REQUEST_ID_CHARS]))
    try:
        yield
    finally:
        _request_id.reset(reset_token)


def get_request_id() -> str:
    """Return the request id of the current call, or "" without one."""
    return _request_id.get()


def make_traceparent() -> str:
    """Return the current span in W3C form, or "" without one."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(TRACEPARENT, "")


def is_traced() -> bool:
    """Return False if a call has neither span nor request id; takes about 0.1 microseconds."""
    return bool(_request_id.get() or context.get_current())


def fill_trace(call: pb.Call) -> None:
    """Write the current span and request id into a call that is about to be sent."""
    traceparent, call_request_id = make_traceparent(), _request_id.get()
    if traceparent or call_request_id:
        call.trace.traceparent = traceparent
        call.trace.request_id = call_request_id


def make_trace_headers() -> dict[str, str]:
    """Return the current span and request id as headers; empty without both."""
    if not is_traced():
        return {}
    headers = {TRACEPARENT: make_traceparent(), REQUEST_ID: _request_id.get()}
    return {name: value for name, value in headers.items() if value}


@contextmanager
def open_server_span(name: str, traceparent: str, caller_request_id: str = "") -> Iterator[None]:
    """Open a span that continues the caller's span; do nothing without trace and request id."""
    if not traceparent and not caller_request_id:
        yield
        return
    with request_id(caller_request_id or get_request_id()):
        if not traceparent:
            yield
            return
        parent = _propagator.extract({TRACEPARENT: traceparent})
        tracer = trace.get_tracer("ludus.env")
        with tracer.start_as_current_span(name, parent, kind=trace.SpanKind.SERVER):
            yield
