"""Adapters for systems with another API. Each starts a peer process with nothing(), add(), echo(x) and many(count)."""

import contextlib
import pickle
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from importlib import metadata

import torch

A, B = torch.ones(4), torch.full((4,), 2.0)


@dataclass(frozen=True)
class Peer:
    nothing: Callable[[], object]
    add: Callable[[], object]  # of two tensors of 4 floats
    echo: Callable[[torch.Tensor], object]
    many: Callable[[int], object]  # makes this many calls of nothing() at once


class Server:
    """The object whose methods the peer process runs."""

    def nothing(self):
        pass

    def add(self, a, b):
        return a + b

    def echo(self, x):
        return x


def connect_ray(stack: contextlib.ExitStack) -> tuple[Peer, str]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    stack.callback(ray.shutdown)
    actor = ray.remote(Server).remote()
    peer = Peer(
        nothing=lambda: ray.get(actor.nothing.remote()),
        add=lambda: ray.get(actor.add.remote(A, B)),
        echo=lambda x: ray.get(actor.echo.remote(x)),
        many=lambda count: ray.get([actor.nothing.remote() for _ in range(count)]),
    )
    return peer, ray.__version__


def connect_monarch(stack: contextlib.ExitStack) -> tuple[Peer, str]:
    from monarch.actor import Actor, endpoint, this_host

    class MonarchServer(Actor):
        @endpoint
        def nothing(self):
            pass

        @endpoint
        def add(self, a, b):
            return a + b

        @endpoint
        def echo(self, x):
            return x

    processes = this_host().spawn_procs(per_host={"cpus": 1})
    stack.callback(lambda: processes.stop().get())
    actor = processes.spawn("server", MonarchServer)

    def many(count):
        for future in [actor.nothing.call_one() for _ in range(count)]:
            future.get()

    peer = Peer(
        nothing=lambda: actor.nothing.call_one().get(),
        add=lambda: actor.add.call_one(A, B).get(),
        echo=lambda x: actor.echo.call_one(x).get(),
        many=many,
    )
    return peer, metadata.version("torchmonarch")


GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def serve_grpc(pipe) -> None:
    """Run in a process of its own; serve pickled calls of Server's methods until the pipe closes."""
    import grpc

    def handler(method):
        return grpc.unary_unary_rpc_method_handler(
            lambda arguments, _: method(*arguments),
            request_deserializer=pickle.loads,
            response_serializer=pickle.dumps,
        )

    server = grpc.server(futures.ThreadPoolExecutor(16), options=GRPC_OPTIONS)
    handlers = {name: handler(getattr(Server(), name)) for name in ("nothing", "add", "echo")}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Server", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.stop(None)


def connect_grpc(stack: contextlib.ExitStack) -> tuple[Peer, str]:
    import grpc
    import torch.multiprocessing as mp

    own_end, child_end = mp.Pipe()
    process = mp.get_context("spawn").Process(target=serve_grpc, args=(child_end,), daemon=True)
    process.start()
    child_end.close()
    stack.callback(process.join)
    stack.callback(own_end.close)
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{own_end.recv()}", options=GRPC_OPTIONS))
    nothing, add, echo = (
        channel.unary_unary(f"/Server/{name}", request_serializer=pickle.dumps, response_deserializer=pickle.loads)
        for name in ("nothing", "add", "echo")
    )

    def many(count):
        for future in [nothing.future(()) for _ in range(count)]:
            future.result()

    peer = Peer(nothing=lambda: nothing(()), add=lambda: add((A, B)), echo=lambda x: echo((x,)), many=many)
    return peer, grpc.__version__


# name of the module, which must be importable -> function that connects
CONNECT = {"ray": connect_ray, "grpc": connect_grpc, "monarch": connect_monarch}
