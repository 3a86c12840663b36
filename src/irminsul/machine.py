"""What the numbers were measured on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


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
    import torch  # noqa: PLC0415 -- the load generator describes machines without it

    return Machine(
        processor=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dtype=dtype,
    )


def usable_cores() -> int:
    """Return the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model, which Linux knows; elsewhere the platform module knows at least the kind."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
