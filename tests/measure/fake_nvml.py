# ruff: noqa: N802
"""NVML as nvidia-ml-py offers it, for machines without a GPU: two cards of different kinds."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


NVML_CLOCK_SM = 1


class FakeNvml:
    """The functions that ridgeline calls, under their names and with their units. The first card
    tells everything; the second is old: no utilisation, no clock reasons, its name in bytes.
    """

    NVMLError, NVML_CLOCK_SM = NVMLError, NVML_CLOCK_SM

    def __init__(self) -> None:
        self.running = False
        self.divided = False
        self.busy, self.memory, self.clock, self.events = 80, 35, 1410, 0x01

    def nvmlInit(self):
        self.running = True

    def nvmlShutdown(self):
        self.running = False

    def nvmlDeviceGetCount(self):
        assert self.running
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"Old card" if handle else "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy, memory=self.memory)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return SimpleNamespace(total=80 * 10**9, used=20 * 10**9, free=60 * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle:
            raise NVMLError("Not Supported")
        return 1_234_567

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle, type):
        assert type == NVML_CLOCK_SM
        return self.clock

    def nvmlDeviceGetMaxClockInfo(self, handle, type):
        assert type == NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetMigMode(self, device):
        if device:
            raise NVMLError("Not Supported")
        return [int(self.divided), 0]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        if handle:
            raise NVMLError("Not Supported")
        return self.events

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        """The name before driver 535."""
        raise NVMLError("Not Supported")
