"""What is on a device under a budget, and what has come and gone."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from sparseautomodel.plan import size_text
from sparseautomodel.slots import Traffic
from sparseautomodel.units import Unit


@dataclass(frozen=True)
class UnitReport:
    """One unit: a block, an expert, or what lies outside the blocks."""

    name: str
    kind: str
    nbytes: int
    state: str
    """`resident`, `streamed`, or `rows`: an embedding of which the rows that are asked for come."""
    copies: int
    """Of the whole unit."""
    copied_nbytes: int
    """Rows of embeddings with them."""
    stalled_seconds: float
    """How long forwards waited for it."""


def report_unit(unit: Unit, is_resident: bool, traffic: Traffic) -> UnitReport:
    state = "resident" if is_resident else "streamed" if unit.streamable else "rows"
    return UnitReport(unit.name, unit.kind, unit.nbytes, state, *astuple(traffic))


@dataclass(frozen=True)
class ResidencyReport:
    """What is on the device, and what has come and gone. `print(report)` is a table."""

    device: str
    home: str
    budget: int
    resident_nbytes: int
    staging_nbytes: int
    working_nbytes: int
    """Expected of the next call."""
    units: tuple[UnitReport, ...]

    @property
    def live_nbytes(self) -> int:
        """Bytes of weights on the device: the resident ones and all slots."""
        return self.resident_nbytes + self.staging_nbytes

    @property
    def streamed_nbytes(self) -> int:
        """Bytes that a forward copies which runs every streamed unit once."""
        return sum(unit.nbytes for unit in self.units if unit.state == "streamed")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"live_nbytes": self.live_nbytes, "streamed_nbytes": self.streamed_nbytes}

    def __str__(self) -> str:
        lines = [
            f"on {self.device}, home in {self.home}: {size_text(self.live_nbytes)} of weights and "
            f"{size_text(self.working_nbytes)} to work with, of {size_text(self.budget)}",
            f"resident {size_text(self.resident_nbytes)}, slots {size_text(self.staging_nbytes)}, streamed a forward "
            f"{size_text(self.streamed_nbytes)}",
        ]
        for unit in self.units:
            moved = f"{unit.copies} copies, {size_text(unit.copied_nbytes)}, waited {unit.stalled_seconds:.3f} s"
            lines.append(f"  {unit.name:32} {size_text(unit.nbytes):>9}  {unit.state:8}  {moved}")
        return "\n".join(lines)
