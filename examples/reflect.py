#!/usr/bin/env python3
"""Talk to a shard that you have no generated code for: everything is learnt by server reflection, as grpcurl does.

    python examples/reflect.py TARGET                         # services and their methods
    python examples/reflect.py TARGET METHOD ['{"json": 1}']  # one call; prints the reply, or a stream of them
"""

from __future__ import annotations

import sys

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "headrace.v1.Generation"


def main(target: str, method: str = "", body: str = "{}") -> int:
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        if not method:
            for name in database.get_services():
                print(name)
            for found in service.methods:
                stream = "stream " if found.server_streaming else ""
                print(f"  {found.name}({found.input_type.name}) returns ({stream}{found.output_type.name})")
            return 0
        what = service.methods_by_name[method]
        request = json_format.Parse(body, GetMessageClass(what.input_type)())
        call = (channel.unary_stream if what.server_streaming else channel.unary_unary)(
            f"/{SERVICE}/{method}", request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(what.output_type).FromString,
        )
        for reply in call(request) if what.server_streaming else [call(request)]:
            print(json_format.MessageToJson(reply, indent=None, preserving_proto_field_name=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]) if len(sys.argv) > 1 else __doc__)
