"""Ports to listen on: free ones, or one line that says who has them."""

import contextlib
import random
import socket

from bertship.errors import InputError

# below the range that the kernel takes the client side of connections from, so a picked port stays free
_FREE_PORTS = range(20_000, 32_000)


def checked_ports(host: str, asked: tuple[int, int, int]) -> list[int]:
    """The ports to listen on (HTTP, gRPC, metrics), each of them free; a free one for every 0."""
    chosen: list[int] = []
    for name, port in zip(("HTTP", "GRPC", "METRICS"), asked, strict=True):
        if not 0 <= port <= 65535:
            raise InputError(f"{name}_PORT={port} is no port: take one of 1 to 65535, or 0 for any free one")
        if port and asked.count(port) > 1:
            raise InputError(f"{name}_PORT={port} is given twice: HTTP, gRPC and metrics need a port each")
        if port and (problem := bind_problem(host, port)):
            raise InputError(
                f"{name}_PORT={port} on {host}: {problem}{_holder(port)}; `make stop` ends an earlier server of ours, "
                f"{name}_PORT=N (--{name.lower()}-port N) takes another port"
            )
        candidates = [port] if port else random.sample(_FREE_PORTS, 100)
        free = (n for n in candidates if port or (n not in (*chosen, *asked) and not bind_problem(host, n)))
        if (number := next(free, None)) is None:
            raise InputError(f"no free port on {host} for {name}_PORT=0: give one")
        chosen.append(number)
    return chosen


def bind_problem(host: str, port: int) -> str:
    """Why a server cannot listen there; empty where it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # connections of an earlier server that linger in TIME_WAIT are no obstacle to Triton either
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # two sockets may be bound with SO_REUSEADDR while neither listens
            probe.listen(1)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _holder(port: int) -> str:
    """Who listens on a port, as ` (by NAME, process PID)`; empty where that is not to be found out."""
    try:
        import psutil  # an optional extra, wanted for this alone
    except ImportError:
        return ""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" (by {psutil.Process(connection.pid).name()}, process {connection.pid})"
    return ""
