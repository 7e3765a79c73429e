"""What is told beside a run: by the server, and by the machine that it runs on.

names.toml   one table per server: our name → its metrics
scrape.py    /metrics read during a run, and what the readings say → ServerReport
config.py    how it says that it is set up → EngineInfo
process.py   whose port it is, and what its processes use: CPU, memory
gpu.py       the GPUs of this machine through NVML
machine.py   both of them read during a run → MachineReport
polling.py   before, every so often, after
"""
