"""StepMany through the gateway: bytes in, bytes out.

    request bytes --ids of the steps--> one server: the same bytes --> its answer's bytes
                                    +-> several: a part each --> merged in order

Where all sessions are on one server, which is the rule for a client that opened groups, the
gateway reads the session ids and copies nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.env.messages.protobuf import fill_error
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError, InvalidCallError, RateLimitError
from ludus.services.gateway.sessions.environments import find_environment
from ludus.services.gateway.sessions.routes import Route, RouteCache
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.callers import current_tenant
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas


@dataclass(slots=True)
class _Part:
    """The steps that go to one server."""

    route: Route
    indices: list[int] = field(default_factory=list)
    session_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepManyContext:
    """What goes with a request beside its bytes."""

    timeout_s: float | None
    """How long the client waits; None for ever."""
    trace: tuple[tuple[str, str], ...] = ()
    """Metadata that joins the spans of one call across processes."""


class StepManyRelay:
    """Passes StepMany on to the servers of the sessions, of all environments."""

    def __init__(
        self,
        environments: Mapping[str, GatewaySessions],
        routes: RouteCache,
        quotas: Quotas,
        metrics: GatewayMetrics,
    ) -> None:
        self._environments = environments
        self._routes = routes
        self._quotas = quotas
        self._metrics = metrics

    async def step_many(self, raw: bytes, context: StepManyContext) -> bytes:
        """The serialised StepManyResponse to a serialised StepManyRequest.

        Raises:
            InvalidCallError: it is no StepManyRequest.
            RateLimitError: more steps than the tenant may take now.
        """
        try:
            request = pb.StepManyRequest.FromString(raw)
        except Exception as error:  # noqa: BLE001 - protobuf has no public class for it
            raise InvalidCallError(
                f"expected a StepManyRequest, got other bytes: {error}"
            ) from None
        try:
            self._quotas.stepping(current_tenant(), len(request.steps))
        except EnvError as error:
            for part in self._split(request)[0]:
                name = part.route.environment
                self._metrics.called(name, "step", error.code, None, len(part.indices))
            raise
        parts, failures = self._split(request)
        if len(parts) == 1 and not failures:
            return await self._forward(parts[0], request, raw, context)
        answers = await asyncio.gather(
            *(self._forward(part, request, _subset(request, part), context) for part in parts)
        )
        replies: dict[int, pb.StepReply] = dict(failures)
        for part, answer in zip(parts, answers, strict=True):
            response = pb.StepManyResponse.FromString(answer)
            replies.update(zip(part.indices, response.replies, strict=True))
        merged = pb.StepManyResponse()
        merged.replies.extend(replies[index] for index in range(len(request.steps)))
        return merged.SerializeToString()

    async def step_many_or_errors(self, raw: bytes, context: StepManyContext) -> bytes:
        """The same for streams, where a rate that is used up must not end the stream."""
        try:
            return await self.step_many(raw, context)
        except RateLimitError as error:
            steps = pb.StepManyRequest.FromString(raw).steps
            replies = [_failure(error, step.session_id) for step in steps]
            return pb.StepManyResponse(replies=replies).SerializeToString()

    def _split(self, request: pb.StepManyRequest) -> tuple[list[_Part], dict[int, pb.StepReply]]:
        """The steps by server, and answers to those that can go nowhere."""
        tenant, routes = current_tenant().name, self._routes
        fresh = routes.fresh(tenant)
        parts: dict[str, _Part] = {}
        failures: dict[int, pb.StepReply] = {}
        for index, step in enumerate(request.steps):
            session_id = step.session_id
            try:
                route = fresh(session_id) or routes.find(session_id, tenant)
                part = parts.get(route.server_id)
                if part is None:
                    find_environment(self._environments, route.environment)
                    part = parts[route.server_id] = _Part(route)
            except EnvError as error:
                failures[index] = _failure(error, session_id)
                continue
            part.indices.append(index)
            part.session_ids.append(session_id)
        return list(parts.values()), failures

    async def _forward(
        self, part: _Part, request: pb.StepManyRequest, raw: bytes, context: StepManyContext
    ) -> bytes:
        """The server's answer; if it cannot be had, an error for each step."""
        sessions = find_environment(self._environments, part.route.environment)
        sessions.touch(part.session_ids)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            link = await sessions.link_to(part.route)
            answer = await link.step_many(
                part.route.server_id,
                raw,
                is_repeatable=lambda: _is_repeatable(request, part),
                timeout_s=context.timeout_s,
                trace=context.trace,
            )
        except EnvError as error:
            for session_id in part.session_ids:
                sessions.note_failure(session_id, error)
            took_s, num_steps = loop.time() - started_s, len(part.indices)
            self._metrics.called(sessions.environment, "step", error.code, took_s, num_steps)
            replies = [_failure(error, session_id) for session_id in part.session_ids]
            return pb.StepManyResponse(replies=replies).SerializeToString()
        took_s = loop.time() - started_s
        self._metrics.stepped(sessions.environment, len(part.indices), took_s)
        return answer


def _is_repeatable(request: pb.StepManyRequest, part: _Part) -> bool:
    """True when every step is numbered or a reset: then it may be sent again."""
    steps = (request.steps[index] for index in part.indices)
    return all(step.step_index or step.HasField("reset") for step in steps)


def _subset(request: pb.StepManyRequest, part: _Part) -> bytes:
    steps = [request.steps[index] for index in part.indices]
    return pb.StepManyRequest(steps=steps).SerializeToString()


def _failure(error: EnvError, session_id: str) -> pb.StepReply:
    reply = pb.StepReply()
    fill_error(reply.error, error, session_id)
    return reply
