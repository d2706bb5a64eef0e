from __future__ import annotations

import pytest
import torch
from torch import nn

from sparseautomodel.devices import Accelerator, MappedHost
from sparseautomodel.mapped import MappedFiles
from sparseautomodel.units import find_units


def test_mapped_host_keeps_the_modules_tensors() -> None:
    layer = nn.Linear(300, 300)
    weight, values = layer.weight, layer.weight.detach().clone()
    (unit,) = find_units(layer)
    files = MappedFiles()
    host = MappedHost(files)
    host.adopt(unit)
    assert layer.weight is weight and files.holds(weight.data)
    host.wait(host.copy(unit, host.allocate(unit.nbytes), host.mark()))
    host.drop(unit)
    assert torch.equal(layer.weight, values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_accelerator_copies_on_a_stream() -> None:
    (unit,) = find_units(nn.Linear(300, 300))
    device = Accelerator(torch.device("cuda", 0))
    device.adopt(unit)
    memory = device.allocate(unit.nbytes)
    device.wait(device.copy(unit, memory, device.mark()))
    built = device.build(unit, memory)
    assert torch.equal(built[0].cpu(), unit.parts()[0]) and device.in_use() >= unit.nbytes
