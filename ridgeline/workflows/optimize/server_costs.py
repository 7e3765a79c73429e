"""What a server's command line and its model's shape say about its steps, before any is measured.

The model need not fit this machine, and the engine need not be able to run it: only its shape
counts. Formats and parallelism are those of the command line.
"""

from __future__ import annotations

from functools import cache

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
    seconds_of,
)
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.hardware.machine import Machine
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import cost_model, kv_bytes_per_token, num_params
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_kv_dtype
from ridgeline.optimize.external.split_layout import SplitLayout, read_split
from ridgeline.optimize.server_settings import WHOLE_COMMAND, flags_of
from ridgeline.plan.simulate.kv_tiers import TierSizes, add_tiers
from ridgeline.plan.step_time.simulated import HostedStepTimes
from ridgeline.roofline import Peaks, PriceStep
from ridgeline.twin.config import TwinConfig
from ridgeline.twin.servers.behaviour import TwinRun, format_of_checkpoint, twin_of
from ridgeline.twin.servers.command_line import ServerLine, find_command
from ridgeline.workflows.configuration_costs import StepBounds
from ridgeline.workflows.optimize.calibrated_step_times import StepSeconds
from ridgeline.workflows.optimize.restartable_server import ServerRecipe
from ridgeline.workflows.targets import catalogue_peaks, sped_up

DEFAULT_SEQS, DEFAULT_TOKENS = 256, 8192  # of a server whose defaults are not known
UNKNOWN_KV_TOKENS = 1 << 20  # a server's memory is not known: assumed not to limit the batch
BLOCK_SIZE = 16
LINK_BYTES_S = 10e9  # between two servers of one host, where the device is not known: assumed
DRAFTER_ACCEPTANCE = 0.7  # of trained heads and draft models, before it is measured


class ServerCosts:
    """Step costs, peaks and schedulers of a server's configurations.

    The peaks are those of the device that the user names or a twin imitates, else of this machine.
    Those of a twin are per second of real time, in which its steps are measured: the device's,
    times the twin's speed.
    """

    def __init__(self, machine: Machine | None, recipe: ServerRecipe, start: Settings) -> None:
        self._machine, self._recipe, self._start = machine, recipe, start
        self.spec = load_planning_spec(start.model)
        self._bounds = cache(self._step_bounds)
        self._memory, self._modelled = cache(self._kv_tokens), cache(self._step_times)
        self._host_memory, self._splits = cache(self._offload), cache(read_split)

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the server takes, as far as its command line tells."""
        line = self.line(self._start)
        given = self._start.max_model_len or (None if line is None else line.max_model_len)
        return given or self.spec.max_positions

    def line(self, settings: Settings) -> ServerLine | None:
        """The command line of a configuration, read; None if its server is not known.

        Raises CannotRun if the server has no flag for one of the settings.
        """
        words = self._recipe.flags.words(settings, self._start)
        if self.split(settings) is not None:  # each half has the flags of the one server
            place = words.index(WHOLE_COMMAND)
            del words[place : place + 2]
        found = find_command(self._recipe.command.text(words))
        return None if found is None else found[1]

    def split(self, settings: Settings) -> SplitLayout | None:
        """The layout of a configuration with prefill and decode apart; None for any other."""
        command = dict(flags_of(settings)).get(WHOLE_COMMAND)
        return None if command is None else self._splits(command)

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds in which the keys and values of a prompt travel between two servers."""
        device, line = self._device(), self.line(self._start)
        rate = LINK_BYTES_S if device is None else find_accelerator(device).network_bytes_s
        devices = 1 if line is None else line.tp
        return num_tokens * kv_bytes_per_token(self.spec) / (rate * devices * self._recipe.speed)

    def bounds(self, settings: Settings) -> StepBounds:
        """The roofline of the configuration's steps."""
        return self._bounds(settings)

    def price(self, settings: Settings) -> PriceStep:
        """FLOPs and bytes of a step."""
        return self._bounds(settings).model.step

    def peaks(self, settings: Settings) -> Peaks:
        """The rates for this configuration's arithmetic."""
        return self._bounds(settings).peaks

    def scheduler(self, settings: Settings) -> Scheduler:
        """A scheduler with the configuration's limits, in the memory that its device leaves."""
        pool = BlockPool(max(1, self._memory(settings) // BLOCK_SIZE), BLOCK_SIZE)
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs or DEFAULT_SEQS,
            max_num_batched_tokens=settings.max_num_batched_tokens or DEFAULT_TOKENS,
            max_model_len=self.max_model_len,
            chunked_prefill=settings.enable_chunked_prefill,
        )
        cached = PrefixCache(pool) if settings.enable_prefix_caching else NoPrefixCache()
        policy = make_policy(settings.batching, wait_s=seconds_of(settings.batch_wait_ms))
        scheduler = Scheduler(limits, policy, pool, cached)
        offload = self._host_memory(settings)
        if offload is not None:
            add_tiers(scheduler, *offload)
        return scheduler

    def _offload(self, settings: Settings) -> tuple[TierSizes, int] | None:
        """Host memory below the prefix cache, and the bytes of a block; None without any."""
        config = self.modelled_server(settings)
        if config is None or not (config.offload_bytes or config.offload_ratio):
            return None
        from ridgeline.twin.build import block_bytes_of, plan_twin, tiers_of

        config = msgspec.structs.replace(config, block_size=BLOCK_SIZE)
        model = plan_twin(config)
        return tiers_of(config, model), block_bytes_of(config, model)

    def replicas(self, settings: Settings) -> int:
        """How many replicas share the requests of the configuration."""
        line = self.line(settings)
        return 1 if line is None else line.dp

    def devices_per_replica(self, settings: Settings) -> int:
        """Over how many devices each replica's layers are divided."""
        line = self.line(settings)
        return 1 if line is None else line.tp

    def flag_effect(self, settings: Settings, measured: Settings) -> StepSeconds | None:
        """The factor that the server's own flags put on the step times of `measured`, by the model
        of the device; None where they are equal or the device is not in the catalogue.
        """
        if flags_of(settings) == flags_of(measured):
            return None
        before, after = self._modelled(measured), self._modelled(settings)
        if before is None or after is None:
            return None
        return lambda shapes, num: after.step_s(shapes, num) / before.step_s(shapes, num)

    def facts(self) -> dict[str, Value]:
        """Name, size and formats of the model."""
        return {
            "model_name": self.spec.name,
            "model_params": num_params(self.spec),
            "model_stored_dtype": self.spec.stored_dtype,
            "model_weights": self.spec.layers[-1].mlp.gate.format.kind,
            "model_kv_bytes_per_token": kv_bytes_per_token(self.spec),
            "model_experts": self.spec.layers[-1].mlp.num_experts,
        }

    def _step_bounds(self, settings: Settings) -> StepBounds:
        spec = self.spec
        if settings.quantization is not None:
            spec = apply_quantization(spec, settings.quantization)
        if settings.kv_cache_dtype != "auto":
            spec = with_kv_dtype(spec, settings.kv_cache_dtype)
        return StepBounds(model=cost_model(spec), peaks=self._peaks(spec))

    def _peaks(self, spec: ModelSpec) -> Peaks:
        device, machine = self._recipe.device, self._machine
        if device is not None:
            return sped_up(catalogue_peaks(device, "bfloat16")[1], self._recipe.speed)
        assert machine is not None, "only a device of the catalogue needs no machine"
        if machine.gpus:
            gpu = machine.gpus[0]
            flops_s, dtype = gpu.gemm_flops.get("bfloat16"), "bfloat16"
            bytes_s = gpu.read_bandwidth_bytes_s or machine.best_bandwidth_bytes_s
        else:
            integer = spec.layers[-1].mlp.gate.format.kind in ("int8", "int4", "int8_sparse24")
            dtype = "int8" if integer and machine.peak_flops("int8") else "float32"
            flops_s = machine.peak_flops(dtype)
            bytes_s = float(machine.bandwidth(cost_model(spec).fixed_weight_bytes))
        if flops_s is None:
            raise CannotRun("this machine was not probed in this dtype", value=dtype)
        source = "measured on this machine"
        return Peaks(flops_s=flops_s, bytes_s=bytes_s, dtype=dtype, source=source)

    def _kv_tokens(self, settings: Settings) -> int:
        """Tokens that the KV cache holds. Raises DoesNotFit where the server would not start."""
        config = self.modelled_server(settings)
        if config is None:
            return UNKNOWN_KV_TOKENS
        from ridgeline.twin.build import plan_twin

        return plan_twin(config).num_kv_tokens

    def _step_times(self, settings: Settings) -> HostedStepTimes | None:
        config = self.modelled_server(settings)
        if config is None:
            return None
        from ridgeline.twin.build import plan_twin, step_times_of

        if config.drafter.kind == "lookup":
            # What these drafts are worth depends on the text: the model says nothing about them.
            config = msgspec.structs.replace(config, num_speculative_tokens=0)
        return step_times_of(config, plan_twin(config).replica)

    def modelled_server(self, settings: Settings) -> TwinConfig | None:
        """The model of the configuration; None where its server or its device is not known."""
        device, line = self._device(), self.line(settings)
        if device is None or line is None:
            return None
        present = self.line(self._start)
        model = line.model if present is None else present.model
        config = twin_of(
            msgspec.structs.replace(line, model=model),
            TwinRun(
                device=device,
                num_devices=line.tp * line.dp,
                drafter_acceptance=DRAFTER_ACCEPTANCE,
            ),
        )
        if line.model == model:
            return config
        # A checkpoint of the same model: its shape, in the format that its name tells.
        weights = format_of_checkpoint(line.model) or config.weight_dtype
        return msgspec.structs.replace(config, weight_dtype=weights)

    def _device(self) -> str | None:
        """The catalogue's name of the server's device, or of this machine's GPU."""
        if self._recipe.device is not None:
            return self._recipe.device
        if self._machine is None or not self._machine.gpus:
            return None
        try:
            return find_accelerator(self._machine.gpus[0].name).name
        except BadInput:
            return None
