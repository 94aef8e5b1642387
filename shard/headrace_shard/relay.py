"""Ranks other than 0 answer Info and Health themselves and pass every other call on to the leader, byte for byte."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import grpc

from headrace._common.errors import Unhealthy
from headrace.v1 import generation_pb2 as pb
from headrace_shard.parallel.group import Trouble
from headrace_shard.service import Context, abort

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"]
LEADER_METADATA = ("headrace-leader", "0")
OWN_HEADERS = {"user-agent", "grpc-timeout", "te", "content-type"}  # of the hop, not of the call
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The service of a following rank."""

    def __init__(self, leader: str, info: pb.InfoResponse, trouble: Callable[[], Trouble | None]) -> None:
        """`leader`: gRPC address of rank 0; `trouble`: why this rank itself is not healthy, or None."""
        self._leader, self._info, self._trouble = leader, info, trouble
        self._channel = grpc.aio.insecure_channel(leader, options=OPTIONS)

    def service(self, details: Any) -> Any:
        """The handler of a method, by its path; None for a method that the service has not."""
        package, _, name = details.method.lstrip("/").partition("/")
        if package != SERVICE.full_name or name not in SERVICE.methods_by_name:
            return None
        if name == "Info":
            return grpc.unary_unary_rpc_method_handler(
                self._own_info, pb.InfoRequest.FromString, pb.InfoResponse.SerializeToString
            )
        if name == "Health":
            return grpc.unary_unary_rpc_method_handler(
                self._own_health, pb.HealthRequest.FromString, pb.HealthResponse.SerializeToString
            )
        if SERVICE.methods_by_name[name].server_streaming:
            return grpc.unary_stream_rpc_method_handler(functools.partial(self._stream, details.method))
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._unary, details.method))

    async def close(self) -> None:
        await self._channel.close()

    async def _own_info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        return self._info

    async def _own_health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        trouble = self._trouble()
        if trouble:
            await abort(context, Unhealthy(trouble.reason))
        return pb.HealthResponse()

    async def _unary(self, method: str, request: bytes, context: Context) -> bytes:
        call = self._channel.unary_unary(method)(request, **_passed_on(context))
        try:
            await context.send_initial_metadata(_plain(await call.initial_metadata()))
            reply: bytes = await call
            context.set_trailing_metadata((*_plain(await call.trailing_metadata()), LEADER_METADATA))
            return reply
        except grpc.aio.AioRpcError as error:
            await self._pass_error(error, context)
            raise
        finally:
            call.cancel()

    async def _stream(self, method: str, request: bytes, context: Context) -> None:
        """One message is read ahead at most: the next is asked for when this one is written."""
        call = self._channel.unary_stream(method)(request, **_passed_on(context))
        try:
            await context.send_initial_metadata(_plain(await call.initial_metadata()))
            async for message in call:
                await context.write(message)
            context.set_trailing_metadata((*_plain(await call.trailing_metadata()), LEADER_METADATA))
        except grpc.aio.AioRpcError as error:
            await self._pass_error(error, context)
        finally:
            call.cancel()

    async def _pass_error(self, error: Any, context: Context) -> None:
        """End with the leader's status, details and metadata; UNAVAILABLE names a leader that cannot be reached."""
        details = error.details() or ""
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            details = f"the leader, rank 0 at {self._leader}, cannot be reached: {details}"
        metadata = (*_plain(error.trailing_metadata()), LEADER_METADATA)
        await context.abort(error.code(), details, metadata)


def _passed_on(context: Context) -> dict[str, Any]:
    """Deadline and metadata of the client's call, for the leader's."""
    metadata = [(k, v) for k, v in context.invocation_metadata() or () if k not in OWN_HEADERS and not k.startswith(":")]
    return {"timeout": context.time_remaining(), "metadata": metadata}


def _plain(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in metadata or ())
