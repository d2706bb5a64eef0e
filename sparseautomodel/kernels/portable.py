"""Run a layer of any scheme on any device: a tile of rows is dequantized, used and dropped.

Memory stays that of the stored tensors plus one tile. Speed is that of dequantizing the weight once a call, so it suits
many tokens at a time.
"""

from __future__ import annotations

from typing import ClassVar

from compressed_tensors.quantization import QuantizationScheme

from sparseautomodel.kernels.base import Kernel


class Portable(Kernel):
    name: ClassVar[str] = "portable: a tile dequantized at a time"
    rank: ClassVar[int] = 100

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        return True
