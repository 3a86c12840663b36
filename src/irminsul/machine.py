"""What the numbers were measured on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """A machine and the software that matters for speed."""

    processor: str
    """Model name of the CPU, or of the GPU that the model ran on."""
    cores: int
    """CPU cores this process may use."""
    threads: int
    """Threads that torch uses."""
    torch: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.processor}, {self.cores} cores, {self.threads} torch threads, torch {self.torch}, {self.dtype}"


def describe_machine(device: str, dtype: str) -> Machine:
    """Look at this machine; ``device`` and ``dtype`` are those of the model."""
    return Machine(
        processor=torch.cuda.get_device_name() if device == "cuda" else _cpu_name(Path("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dtype=dtype,
    )


def _cpu_name(cpuinfo: Path) -> str:
    """Linux knows the model's name; elsewhere the platform module knows at least the kind."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
