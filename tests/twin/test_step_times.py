"""Many decode steps of a twin at once take as long as one after the other."""

from __future__ import annotations

import pytest

from ridgeline.plan.step_time.simulated import HostTime
from ridgeline.twin.build import plan_twin, step_times_of
from ridgeline.twin.config import TwinConfig

HOSTS = {
    "captured graphs": HostTime(),
    "scheduling waits": HostTime(step_s=0.8e-3, sequence_s=6e-6),
    "masks": HostTime(token_s=1e-4),
    "launches take longer": HostTime(layer_s=5e-3, step_s=0.8e-3, sequence_s=6e-6),
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_line_of_decode_steps_matches_single_steps(host: HostTime, drafts: int) -> None:
    config = TwinConfig(
        model="llama-3.1-8b",
        device="l4",
        host=host,
        num_speculative_tokens=drafts,
        acceptance=0.5,
    )
    times = step_times_of(config, plan_twin(config).replica)
    computed = [200, 400, 600]
    line = times.linear_steps(computed, 40)
    assert line is not None
    single_s = sum(times.step_s([(1, done + step) for done in computed], 3) for step in range(40))
    assert line.seconds(40) == pytest.approx(single_s, rel=0.01)
