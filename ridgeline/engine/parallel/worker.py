"""The process of a rank other than 0: `python -m ridgeline.engine.parallel.worker FD`.

FD is the socket to rank 0, which starts these processes (`RankGroup`).
"""

from __future__ import annotations

import ridgeline.engine.import_torch  # noqa: F401  # before any import of torch

# isort: split
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import msgspec
import torch

from ridgeline.engine.parallel.exchange.connect import make_collectives
from ridgeline.engine.parallel.messages import Channel, Command, Fault, Loaded, RankConfig
from ridgeline.engine.parallel.rank import RankWorker, load_model
from ridgeline.errors import RankFailed, UserError

GRACE_S = 2.0
"""Seconds between the end of rank 0 and that of a worker that is computing."""


def main(descriptor: int) -> int:
    """Load, then execute commands until rank 0 hangs up; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    config = channel.receive(msgspec.msgpack.Decoder(RankConfig))
    if config is None:
        return 1
    threading.Thread(target=_end_with_rank_0, args=(channel.socket,), daemon=True).start()
    try:
        serve(config, channel)
    except BaseException as error:
        is_ours = isinstance(error, UserError | RankFailed)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            channel.send(Fault(text, type(error).__name__ if is_ours else ""))
        return 1
    return 0


def serve(config: RankConfig, channel: Channel) -> None:
    """Load the model, meet the other ranks and execute commands."""
    torch.set_num_threads(config.num_threads)
    host = None
    if (address := config.address) is not None:
        is_remote = channel.socket.family != socket.AF_UNIX
        host = channel.socket.getsockname()[0] if is_remote else address.host
    if config.device != "cpu":
        torch.cuda.set_device(config.device)
    collectives = make_collectives(
        config.shard, config.timeout_s, config.segment, host, config.device
    )
    model = load_model(config, collectives)
    channel.send(Loaded(model.decoder.nbytes))
    collectives.connect(config.store)
    worker = RankWorker(model)
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    while (command := channel.receive(decoder)) is not None:
        worker.execute(command)


def _end_with_rank_0(end: socket.socket) -> None:
    """End this process soon after rank 0 has hung up, even within an exchange."""
    poll = select.poll()
    poll.register(end.fileno(), select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # without the seconds that torch takes to unload
