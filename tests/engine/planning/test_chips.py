"""Which of the chips a device is, by the name that its driver gives it."""

import pytest
import torch

from thresher.engine.planning.time import CHIPS, this_chip


def test_chips_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        name, total_memory = "", 80e9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Found)
    for name, chip in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
    ):
        Found.name = name
        assert this_chip(torch.device("cuda")) is CHIPS[chip]
    Found.name, Found.total_memory = "NVIDIA A100-SXM4-40GB", 42e9
    assert this_chip(torch.device("cuda")) is CHIPS["A100-40"]
    for name, rate, bandwidth in (("NVIDIA H100 PCIe", 756e12, 2.0e12), ("NVIDIA H800", 989e12, 3.35e12)):
        Found.name = name
        chip_here = this_chip(torch.device("cuda"))
        assert chip_here is not None and (chip_here.flops_per_s, chip_here.bytes_per_s) == (rate, bandwidth)
        assert chip_here.name not in CHIPS
    Found.name = "Tesla T4"
    assert this_chip(torch.device("cuda")) is None and this_chip(torch.device("cpu")) is None
