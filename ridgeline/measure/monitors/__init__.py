"""What is observed during a run: the server's metrics and configuration, and its machine.

metric_names.toml     one table per server: our name → its metrics
server_metrics.py     readings of /metrics during a run → ServerReport
server_config.py      how the server says that it is configured → EngineInfo
process_usage.py      CPU and memory of the processes behind a port
gpu.py                GPUs of this machine through NVML
machine_monitor.py    both of them during a run → MachineReport
polling.py            a reading before, during and after a run
"""
