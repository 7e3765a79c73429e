"""Connections that break at random bytes of an answer: every answer is complete and right."""

from __future__ import annotations

import random

import httpx
import pytest

from tests.fleet.answers import REQUESTS
from tests.fleet.cutting import CuttingBackend, real_server, run_with_cuts
from tests.fleet.kill_load import fetch
from tests.fleet.scripted import gateway_over


@pytest.mark.slow
async def test_cut_connections_lose_and_change_no_answer() -> None:
    async with real_server() as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            right = {name: await fetch(http, name) for name in REQUESTS}
        backends = [CuttingBackend(port, down_s=0.1) for _ in range(3)]
        async with gateway_over(*backends, policy="least-loaded", retry_share=1.0) as http:
            report = await run_with_cuts(http, right, backends, 20, 6, random.Random(3))
            page = (await http.get("/metrics")).text
    assert not report.wrong, report.wrong[:3]
    assert set(report.num_answers) == set(REQUESTS)
    assert sum(backend.num_cuts for backend in backends) == 20
    assert "ridgeline_fleet_lost_total 0" in page or "ridgeline_fleet_lost_total" not in page
