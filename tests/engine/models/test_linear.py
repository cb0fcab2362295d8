"""A packed layer computes what the plain one computes, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from engine.models.linear import PackedLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_a_plain_linear_layer_for_any_number_of_rows(dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 160, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    layer = PackedLinear(weight, bias)
    assert (layer.in_features, layer.out_features) == (160, 96)
    x = torch.randn(70, 160, generator=generator).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for rows in (1, 2, 7, 32, 70):
        result = layer(x[:rows])
        assert result.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(result.double(), exact[:rows], atol=tolerance, rtol=0)
