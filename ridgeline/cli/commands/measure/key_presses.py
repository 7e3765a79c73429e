"""Keys pressed on a terminal while a command shows something."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_S = 0.2


@contextmanager
def key_presses(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key`, from a thread, with every key that is pressed in the block.

    The terminal echoes nothing meanwhile. Does nothing if standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    settings, ended = termios.tcgetattr(terminal), threading.Event()

    def read_keys() -> None:
        while not ended.is_set():
            if select.select([terminal], [], [], POLL_S)[0]:
                on_key(os.read(terminal, 1).decode(errors="ignore"))

    thread = threading.Thread(target=read_keys, daemon=True)
    try:
        tty.setcbreak(terminal)
        thread.start()
        yield
    finally:
        ended.set()
        thread.join()
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
