"""What the makers of devices publish about them, and the devices that are known by name.

Rates are of dense matrix products (not of sparse ones, which data sheets like to print) with sums in float32. The
memory is the number in the device's name, which counts 2^30 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class DataSheet:
    """A device as its maker describes it."""

    name: str
    bandwidth_gb_s: float
    """Bytes a second that its memory delivers, in 10^9."""
    tflops: float
    """Flops a second in bfloat16, in 10^12."""
    memory_gb: float
    fp8_tflops: float | None = None
    """The same in float8; `None`: it does not know float8."""
    link_gb_s: float = 25.0
    """How fast it sends to another device, and receives at the same time."""
    calibrated_as: str = ""
    """The name that the device has in calibrations."""
    note: str = ""

    def __post_init__(self) -> None:
        if min(self.bandwidth_gb_s, self.tflops, self.memory_gb, self.link_gb_s) <= 0:
            raise ConfigError(f"The numbers of the device '{self.name}' must be above 0.")

    def __str__(self) -> str:
        fp8 = "no FP8" if self.fp8_tflops is None else f"{self.fp8_tflops:,g} in FP8"
        return f"{self.bandwidth_gb_s:,g} GB/s, {self.tflops:,g} TFLOP/s ({fp8}), {self.memory_gb:g} GB"


_MI300X_NOTE = "Headway has not been run on this device, and its kernels are written for NVIDIA's."

DEVICES = (
    # NVIDIA B200 data sheet (HGX B200, one of eight): 8 TB/s, 180 GB usable of 192; 2.25 PFLOP/s bfloat16, 4.5 float8.
    DataSheet("b200", 8000.0, 2250.0, 180.0, 4500.0, link_gb_s=900.0, calibrated_as="NVIDIA B200"),
    # NVIDIA H200 Tensor Core GPU data sheet (SXM): 4.8 TB/s, 141 GB; 1,979 and 3,958 TFLOP/s with sparsity.
    DataSheet("h200", 4800.0, 989.0, 141.0, 1979.0, link_gb_s=450.0, calibrated_as="NVIDIA H200"),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM): 3.35 TB/s, 80 GB; 1,979 and 3,958 TFLOP/s with sparsity.
    DataSheet("h100", 3350.0, 989.0, 80.0, 1979.0, link_gb_s=450.0, calibrated_as="NVIDIA H100 80GB HBM3"),
    # The same data sheet (PCIe): 2 TB/s, 80 GB; 1,513 and 3,026 TFLOP/s with sparsity.
    DataSheet("h100-pcie", 2000.0, 756.5, 80.0, 1513.0, calibrated_as="NVIDIA H100 PCIe"),
    # AMD Instinct MI300X data sheet: 5.3 TB/s, 192 GB; 1,307 TFLOP/s bfloat16, 2,615 float8, dense.
    DataSheet("mi300x", 5300.0, 1307.0, 192.0, 2615.0, link_gb_s=64.0, note=_MI300X_NOTE),
    # NVIDIA A100 Tensor Core GPU data sheet (80GB SXM): 2,039 GB/s; 312 TFLOP/s bfloat16, dense.
    DataSheet("a100-80", 2039.0, 312.0, 80.0, link_gb_s=300.0, calibrated_as="NVIDIA A100-SXM4-80GB"),
    # The same data sheet (40GB SXM): 1,555 GB/s.
    DataSheet("a100-40", 1555.0, 312.0, 40.0, link_gb_s=300.0, calibrated_as="NVIDIA A100-SXM4-40GB"),
    # NVIDIA L40S data sheet: 864 GB/s, 48 GB; 362 TFLOP/s bfloat16, 733 float8, dense.
    DataSheet("l40s", 864.0, 362.0, 48.0, 733.0, calibrated_as="NVIDIA L40S"),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: 1,008 GB/s, 24 GB; 165.2 TFLOP/s bfloat16 and 330.3 float8,
    # dense, with sums in float32.
    DataSheet("rtx4090", 1008.0, 165.2, 24.0, 330.3, calibrated_as="NVIDIA GeForce RTX 4090"),
    # NVIDIA A10 Tensor Core GPU data sheet: 600 GB/s, 24 GB; 125 TFLOP/s bfloat16, dense.
    DataSheet("a10", 600.0, 125.0, 24.0, calibrated_as="NVIDIA A10"),
    # NVIDIA L4 Tensor Core GPU data sheet: 300 GB/s, 24 GB; 242 and 485 TFLOP/s with sparsity.
    DataSheet("l4", 300.0, 121.0, 24.0, 242.5, calibrated_as="NVIDIA L4"),
)
"""The fastest first."""


def known_device(name: str) -> DataSheet | None:
    """The device of this name; spaces, dashes and capitals do not matter."""
    return next((sheet for sheet in DEVICES if _plain(sheet.name) == _plain(name)), None)


def find_device(name: str, *, others: tuple[str, ...] = ()) -> DataSheet:
    """The device of this name; `ConfigError` lists those that are known, and the `others` that may be named."""
    if (found := known_device(name)) is not None:
        return found
    names = tuple(sheet.name for sheet in DEVICES)
    hint = did_you_mean(name.lower(), names + others)
    listed = f"; calibrations are {', '.join(others)}" if others else ""
    raise ConfigError(
        f"--machine: there is no device '{name}'.{hint} Known are {', '.join(names)}{listed}. Describe another with "
        "--bandwidth-gb-s, --tflops and --memory-gb."
    )


def device_calibrated_as(device_name: str) -> DataSheet | None:
    """The device that a calibration was made on."""
    return next((sheet for sheet in DEVICES if sheet.calibrated_as and sheet.calibrated_as == device_name), None)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia").removeprefix("amd")
