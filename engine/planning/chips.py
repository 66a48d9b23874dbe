"""The GPUs that predictions are made for: what their makers say of them, and what follows from it.

Peak is that of dense bfloat16 products with float32 sums: SMs x products a cycle of one x the boost clock. Bandwidth is
the memory's. Both are ceilings of data sheets, and a bare matmul or a bare copy stays below them.

    data sheets of NVIDIA: A100 40GB and 80GB SXM, A800 80GB SXM (an A100 with slower NVLink), H100 SXM and PCIe, H800
    SXM (an H100 with slower NVLink), H200 SXM
    NVLink, both directions together, of which one is half: A100 600 GB/s, A800 400, H100 and H200 900, H800 400; the
    H100 PCIe's PCIe 5.0 x16: 128
    latency of a load that misses every cache, in cycles: Luo et al. 2024, "Benchmarking and Dissecting the Nvidia
    Hopper GPU Architecture via Microbenchmarking", the table of memory latencies: 466 on an A100, 479 on an H100. The
    H200 is taken for an H100 with other memory.

Little's law: bytes in flight = latency x bandwidth. A multiprocessor that keeps fewer than its share on the way cannot
fill the memory's bandwidth. The latency is that of an idle memory. Under load it is longer, so the figure is necessary
and not sufficient.

Deliberately absent: anything measured here, links between machines, the L2 cache.
"""

from dataclasses import dataclass, replace

import torch

GB, TB, TERA = 1e9, 1e12, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """flops_per_s: dense bfloat16, multiplications and additions. memory and bytes_per_s: of its HBM.
    link_bytes_per_s: to the other GPUs of its machine, a direction."""

    name: str
    capability: int
    sms: int
    clock_hz: float
    flops_per_s: float
    memory: float
    bytes_per_s: float
    link_bytes_per_s: float
    latency_cycles: int

    @property
    def latency_s(self) -> float:
        return self.latency_cycles / self.clock_hz

    @property
    def bytes_in_flight_per_sm(self) -> float:
        """What Little's law asks of one multiprocessor."""
        return self.latency_s * self.bytes_per_s / self.sms


def _ampere(name: str, memory: float, bytes_per_s: float, links: float = 600 * GB) -> Chip:
    return Chip(
        name=name,
        capability=80,
        sms=108,
        clock_hz=1.41e9,
        flops_per_s=312 * TERA,
        memory=memory,
        bytes_per_s=bytes_per_s,
        link_bytes_per_s=links / 2,
        latency_cycles=466,
    )


def _hopper(name: str, memory: float, bytes_per_s: float, links: float = 900 * GB) -> Chip:
    return Chip(
        name=name,
        capability=90,
        sms=132,
        clock_hz=1.83e9,
        flops_per_s=989 * TERA,
        memory=memory,
        bytes_per_s=bytes_per_s,
        link_bytes_per_s=links / 2,
        latency_cycles=479,
    )


CHIPS = {
    chip.name: chip
    for chip in (
        _ampere("A100-40", 40 * GB, 1.555 * TB),
        _ampere("A100-80", 80 * GB, 2.039 * TB),
        _ampere("A800", 80 * GB, 2.039 * TB, 400 * GB),
        _hopper("H100", 80 * GB, 3.35 * TB),
        _hopper("H200", 141 * GB, 4.8 * TB),
    )
}
# Nobody's prediction is asked for on these, but they may be what a bench runs on.
_H800 = _hopper("H800", 80 * GB, 3.35 * TB, 400 * GB)
_H100_PCIE = replace(
    _hopper("H100-PCIe", 80 * GB, 2.0 * TB, 128 * GB), sms=114, clock_hz=1.755e9, flops_per_s=756 * TERA
)


def fastest(capability: int) -> Chip:
    """Of the chips with this compute capability the one whose memory asks for most bytes in flight."""
    return max((chip for chip in CHIPS.values() if chip.capability == capability), key=lambda chip: chip.bytes_per_s)


def this_chip(device: torch.device) -> Chip | None:
    """The chip that a device is, by its name and memory; None for one that is not known here."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    if "A100" in found.name:
        return CHIPS["A100-80" if found.total_memory > 50e9 else "A100-40"]
    known = {"H100 PCIe": _H100_PCIE, **{chip.name: chip for chip in (_H800, *CHIPS.values())}}
    return next((chip for name, chip in known.items() if name in found.name), None)
