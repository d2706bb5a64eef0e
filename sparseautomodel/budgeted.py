"""Loading under a `device_budget`: where a checkpoint's tensors have their home, and the model under its budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.accelerate import check_and_set_device_map

from sparseautomodel.architecture import Architecture
from sparseautomodel.arguments import accelerator, check_device
from sparseautomodel.checkpoint import LazyTensor, StoredTensor
from sparseautomodel.compressed_layers import CompressedLinear
from sparseautomodel.devices import Accelerator, Device, MappedHost
from sparseautomodel.mapped import MappedFiles
from sparseautomodel.residency import Residency


def execution_device(kwargs: dict[str, Any]) -> torch.device:
    """Where the model is to run: `device` or `device_map`, else the accelerator there is. Loading stays on the host.

    Raises:
        ValueError: more than one device is named, or one that is not there.
    """
    named, mapped = kwargs.pop("device", None), kwargs.pop("device_map", None)
    given = named if named is not None else mapped
    places = check_and_set_device_map(given if given != "auto" else None)
    found = set(places.values()) if isinstance(places, dict) else {places}
    if len(found) != 1 or (named is not None and mapped is not None) or found & {"disk", "meta"}:
        raise ValueError(
            f"device_budget is for one device, and device={named!r}, device_map={mapped!r} say otherwise: give "
            "device_map='cuda' or device_map='cpu', or leave it out"
        )
    (place,) = found
    device = torch.device(place) if place is not None else accelerator() or torch.device("cpu")
    check_device(device)
    kwargs["device_map"] = "cpu"
    return device


def home_for(device_budget: int | str | Home | None, kwargs: dict[str, Any]) -> Home | None:
    """Where the weights of a model under this budget live; None without a budget. Several models have a budget
    together where one of them is given its home."""
    if device_budget is None:
        return None
    home = device_budget if isinstance(device_budget, Home) else Home(execution_device(kwargs), device_budget)
    if kwargs.get("gguf_file") is not None and home.is_on_host:
        raise ValueError(
            f"gguf_file={kwargs['gguf_file']!r} and device_budget on the processor: transformers dequantizes the whole "
            "file in memory, and no budget holds while it does. Convert it where there is memory for that, "
            "AutoModelForCausalLM.from_pretrained(path, gguf_file=...).save_pretrained(folder), then: "
            "from_pretrained(folder, recipe='w4a16', device='cpu', device_budget=...)"
        )
    return home


class Home:
    """Where the weights of one model live while they are not on the device."""

    def __init__(
        self, device: torch.device, budget: int | str, parked: str | None = None, place: Device | None = None
    ) -> None:
        """
        Args:
            parked: nothing is brought to the device when the model is loaded, as after `Residency.park(parked)`.
            place: what holds the weights while they are used; None: the one for `device`.
        """
        self._device, self.budget, self._parked, self._place = device, budget, parked, place
        self._files = MappedFiles() if device.type == "cpu" else None

    @property
    def is_on_host(self) -> bool:
        """Whether the budget is for memory of this process, and so also while the model is loaded."""
        return self._device.type == "cpu" and (self._place is None or not self._place.copies_values)

    def tensors(
        self, tensors: Mapping[str, LazyTensor], architecture: Architecture, dtype: torch.dtype
    ) -> dict[str, LazyTensor]:
        """The tensors of a checkpoint such that what is read of them is at home already.

        Home is in files if the model runs on the processor, or the memory of the host is too small for it.

        Args:
            dtype: of the model.
        """
        if self._files is None and sum(tensor.nbytes for tensor in tensors.values()) > _available() * 0.8:
            self._files = MappedFiles()
        if self._files is None:
            return dict(tensors)
        result: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            parameter, kind = architecture.parameters.get(name), tensor.dtype
            if parameter is not None and kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                kind = architecture.loaded_dtype(parameter, dtype)
            result[name] = _AtHome(tensor, self._files, kind)
        return result

    def model_class(self, model_class: Any) -> Any:
        """`model_class` such that parameters which the loader makes of several tensors go home as they are set."""
        if self._files is None:
            return model_class
        files = self._files

        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            model_class.__init__(self, *args, **kwargs)
            for module in self.modules():
                module._parameters = _HomingParameters(module._parameters, files)

        body = {"__init__": build, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
        return type(model_class.__name__, (model_class,), body)

    def loaded(self, model: Any, model_class: Any) -> None:
        """The loader has done its work: `model` is one of `model_class` again."""
        if self._files is not None:
            model.__class__ = model_class
            for module in model.modules():
                module._parameters = dict(module._parameters)
            self.rest()

    def rest(self) -> None:
        """Let go of the pages that were looked at."""
        if self._files is not None:
            self._files.rest()

    def settle(self, model: Any) -> None:
        """Lay compressed layers out for the processor, one after another; what is laid out goes home.

        A layout for another device can only be made there: layers that are streamed to it run as they are stored.
        """
        if self._device.type != "cpu":
            return
        for module in model.modules():
            if isinstance(module, CompressedLinear):
                module.settle()
                for value in module._parameters.values():
                    if value is not None and self._files is not None:
                        value.data = self._files.keep(value.data)
                self.rest()

    def attach(self, model: Any, budget: int | str | None = None) -> Any:
        """The model under its budget: it has `model.residency`.

        Args:
            budget: another one than that of the model which this is the home of.

        Raises:
            ValueError: the budget is too small.
        """
        if isinstance(model, tuple):  # with the loader's info
            return self.attach(model[0]), *model[1:]
        if self._place is None and self._device.type == "cpu":
            assert self._files is not None
            self._place = MappedHost(self._files)
        self._place = self._place or Accelerator(self._device, self._files)
        model.residency = Residency(model, self._place, budget or self.budget, self._parked)
        return model


class _AtHome(LazyTensor):
    """A tensor that is a view on a file, its own or another, when it is read."""

    def __init__(self, tensor: LazyTensor, files: MappedFiles, dtype: torch.dtype) -> None:
        super().__init__(tensor.name, tuple(tensor.shape), tensor.dtype)
        self._tensor, self._files, self._cast = tensor, files, dtype

    def __getitem__(self, index: Any) -> Tensor:
        found = None
        if isinstance(self._tensor, StoredTensor) and self._cast == self.dtype:
            found = self._files.stored(self._tensor)
        if found is None and index is Ellipsis:
            return self._files.keep(self._tensor[...].to(self._cast))
        return self._tensor[index] if found is None else found[index]


class _HomingParameters(dict[str, Any]):
    """The `_parameters` of a module while they are loaded."""

    def __init__(self, values: Mapping[str, Any], files: MappedFiles) -> None:
        super().__init__(values)
        self._files = files

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor) and not value.is_meta and not self._files.holds(value.data):
            value.data = self._files.keep(value.data)
            self._files.rest()
        super().__setitem__(key, value)


def _available() -> float:
    """Bytes of memory that are free on this machine; without end where it does not say."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else float("inf")
