"""Processes that train together over gloo, as torchrun would start them."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

PRELOADED = ["train.pretrain", "train.finetune", "torch.utils.tensorboard"]


def fresh_processes() -> Any:
    """Processes that have the libraries loaded and nothing else of this one's: each is as a user's is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(what: Callable[..., None], *arguments: Any, count: int = 2) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = fresh_processes()
    started = [context.Process(target=_process, args=(rank, count, port, what, arguments)) for rank in range(count)]
    for process in started:
        process.start()
    return started


def together(what: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    for process in start(what, *arguments, count=count):
        process.join(120)
        assert process.exitcode == 0


def _process(rank: int, count: int, port: int, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in facts.items()})
    what(*arguments)
