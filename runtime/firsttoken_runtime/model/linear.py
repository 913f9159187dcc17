"""A linear layer, with the weight in the layout that the machine multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b.

    On CPU in float32 the weight is packed once into oneDNN's blocked layout and the plain one dropped.
    Measured on 2 AVX-512 cores with SmolLM2's shapes, against the plain layout: one row 1.5 to 2 times as
    fast, 4 to 16 rows 3 to 4 times, 1,024 rows 1.1 times. Elsewhere this is `torch.nn.functional.linear`.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]; both on the device and in the dtype to compute in."""
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and can_pack()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


_packs: bool | None = None


def can_pack() -> bool:
    """Whether this build of torch packs weights; tried out once, for the operators are not public."""
    global _packs
    if _packs is None:
        try:
            weight, x = torch.eye(16), torch.arange(32.0).view(2, 16)
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            product = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
            _packs = torch.backends.mkldnn.is_available() and bool(torch.equal(product, x))
        except (AttributeError, RuntimeError, NotImplementedError):
            _packs = False
    return _packs
