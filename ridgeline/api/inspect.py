"""Describe a model, and check this machine."""

from __future__ import annotations

from ridgeline.api.keywords import command_options
from ridgeline.config.tools import DoctorOptions, InspectOptions
from ridgeline.hub.download import ensure_downloaded
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.check_machine import MachineReadiness, check_machine
from ridgeline.workflows.inspect_model import ModelInspection, inspect_model


def inspect(
    model: str,
    *,
    against: str | None = None,
    what_if: str | None = None,
    layout: str | None = None,
    observer: Observer = silent,
) -> ModelInspection:
    """Show a model's parameters, FLOPs, bytes and KV cache.

    >>> import ridgeline
    >>> model = ridgeline.inspect("dummy:qwen3-0.6b")
    >>> model.model, model.is_sound
    ('dummy:qwen3-0.6b', True)

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights).
        against: Original of a quantised model, to measure the error against.
        what_if: Compare the KV cache with that of an edited model, in place of the usual tables:
            'key=value' of kv_heads, window, global_every, share, latent, kv_dtype and context.
        layout: Show what each process or device of a parallel layout holds, in place of the usual
            tables: 'key=N' of tp, pp, ep and cp.
        observer: Called with every progress event; `print` shows them as lines.

    Returns:
        The arithmetic of the model, and a check of every layer if it is quantised.

    Raises:
        UserError: An option is wrong, or the model cannot be read.
    """
    options = command_options("inspect", InspectOptions, locals())
    for name in filter(None, (options.model, options.against)):
        ensure_downloaded(name, observer)
    return inspect_model(
        options.model, against=options.against, what_if=options.what_if, layout=options.layout
    )


def doctor(*, refresh: bool = False) -> MachineReadiness:
    """Check this machine and report problems.

    >>> import ridgeline
    >>> machine = ridgeline.doctor()  # doctest: +SKIP
    >>> machine.ready, [check.name for check in machine.checks if not check.ok]  # doctest: +SKIP
    (True, [])

    Args:
        refresh: Measure again, even if there are recent results.

    Returns:
        Every check with its result and, if it failed, a fix.

    Raises:
        UserError: `refresh` is not a bool.
    """
    options = command_options("doctor", DoctorOptions, locals())
    return check_machine(refresh=options.refresh)
