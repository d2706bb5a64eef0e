"""Groups as recipes write them. What the keys mean as a whole is tested in test_scheme_keys.py."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from sparseautomodel.modifiers.base import ModifierError
from sparseautomodel.modifiers.group_keys import WITHOUT_DATA, explicit, normal, observer_name, observes_inputs
from sparseautomodel.scales import ErrorSearch


def test_presets_that_need_data_have_a_neighbour_that_does_not() -> None:
    observing = {name for name in PRESET_SCHEMES if observes_inputs(preset_name_to_scheme(name, ["Linear"]))}
    assert observing == set(WITHOUT_DATA) == {"FP8", "NVFP4"}
    assert WITHOUT_DATA == {"FP8": "FP8_DYNAMIC", "NVFP4": "NVFP4A16"}


@pytest.mark.parametrize("name", [name for name in PRESET_SCHEMES if name != "UNQUANTIZED"])
def test_a_preset_spelled_out_is_the_preset(name: str) -> None:
    preset = preset_name_to_scheme(name, ["Linear"])
    written = normal("config_groups", {"a": preset})["a"]
    found = explicit("a", written, "minmax", ErrorSearch())
    assert found.targets == ("Linear",) and found.automatic is None and not found.sized
    for part in ("weights", "input_activations"):
        wanted, got = getattr(preset, part), getattr(found.scheme, part)
        assert (wanted is None) == (got is None)
        if wanted is not None:
            unused = {"observer": None, "zp_dtype": None}
            assert got.model_copy(update=unused) == wanted.model_copy(update=unused)


def test_names_of_observers() -> None:
    assert [observer_name("observer", name) for name in ("mse", "memoryless_mse", "static_minmax")] == [
        "mse",
        "mse",
        "minmax",
    ]
    with pytest.raises(ModifierError, match="Allowed: minmax, mse"):
        observer_name("observer", "moving_average")


def test_targets_are_lists_and_presets_capitals() -> None:
    assert normal("scheme", "w8a8") == "W8A8" and normal("scheme", None) is None
    assert normal("scheme", {"fp8": "Linear"}) == {"FP8": ["Linear"]}
    group = QuantizationScheme(targets=["Linear"], weights={"num_bits": 4})
    weights = {"num_bits": 4, "strategy": "tensor"}
    assert normal("config_groups", {"a": group})["a"] == {"targets": ["Linear"], "weights": weights}
