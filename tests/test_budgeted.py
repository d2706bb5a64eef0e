from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseautomodel.budgeted import execution_device


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {}])
def test_one_device_is_named_and_loading_stays_on_the_host(given: dict[str, Any]) -> None:
    kwargs = given | {"dtype": "auto"}
    if given or not torch.accelerator.is_available():
        assert execution_device(kwargs) == torch.device("cpu")
        assert kwargs == {"dtype": "auto", "device_map": "cpu"}


def test_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device_budget is for one device"):
        execution_device({"device_map": {"model": "cpu", "lm_head": "disk"}})
