"""LoRA adapters: low-rank additions to the linear layers of a native decoder, chosen by each request.

    y = x W^T + scale * (x A^T) B^T        (Hu et al. 2021, arXiv 2106.09685)

The weights W are shared: a step computes them once for all its rows, and A and B for the rows of their adapter. An
adapter is a folder in PEFT's form: adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError

from engine.adapter_config import WEIGHTS, AdapterConfig
from engine.errors import InvalidCheckpoint, UnsupportedModel, shown
from engine.models import AdapterRows
from engine.models.config import ModelConfig
from engine.models.linear import Linear, make_linear
from engine.models.weights import cut_of, of_other_stages, open_tensors, shortened
from engine.partition import Part

_PREFIX = "base_model.model."
_SUPPORTED = "q_proj, k_proj, v_proj, o_proj and, in layers without experts, gate_proj, up_proj and down_proj"
_READABLE = (torch.float32, torch.bfloat16, torch.float16)


class Adapters:
    """The adapters of one rank's part of a decoder, and the rows of the current step that have one. Used by one
    thread."""

    def __init__(
        self, folders: Mapping[str, str], part: Part, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`folders` by name: an adapter's index is its place among the sorted names. Raises InvalidCheckpoint,
        UnsupportedModel."""
        self.rows: AdapterRows = ()
        """Of the current step, and in the last layer of the tokens that are needed."""
        self._files = [_AdapterFile(AdapterConfig.read(name, folders[name]), part, config) for name in sorted(folders)]
        self._dtype = dtype
        self._device = device

    def added_to(self, base: Linear, parts: Mapping[str, int], in_features: int) -> Linear:
        """`base`, which has the projections `parts` (name -> output features of the whole model) of one input, with
        what adapters add to them. Raises InvalidCheckpoint for a tensor that does not fit."""
        additions = [file.take(parts, in_features, self._dtype, self._device) for file in self._files]
        return AdaptedLinear(base, additions, self) if any(additions) else base

    def keep(self, rows: torch.Tensor) -> None:
        """The step goes on with these rows alone, int64 [num_rows]."""
        self.rows = [(adapter, torch.isin(rows, own).nonzero().flatten()) for adapter, own in self.rows]

    def finish(self) -> None:
        """Closes the files. Raises UnsupportedModel if tensors were not taken, but for those of other stages."""
        for file in self._files:
            file.finish()
        self._files.clear()


class AdaptedLinear:
    """A linear layer, and for the rows of each adapter that changes it what that adds. A row's bits depend neither on
    the other rows nor on their adapters."""

    def __init__(self, base: Linear, additions: Sequence[_LowRank | None], adapters: Adapters) -> None:
        """`additions`: by index of the adapter."""
        self._base = base
        self._additions = additions
        self._adapters = adapters

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        y = self._base(x)
        for adapter, rows in self._adapters.rows:
            addition = self._additions[adapter]
            if addition is None or not len(rows):
                continue
            if len(rows) == len(x):
                y.add_(addition(x))
            else:
                y.index_add_(0, rows, addition(x.index_select(0, rows)))
        return y


class _LowRank:
    """What one adapter adds to a layer's output."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """down [rank, in_features], up [out_features, rank], which has the scale."""
        self._down = make_linear(down)
        self._up = make_linear(up)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        return self._up(self._down(x))


class _AdapterFile:
    """The tensors of one adapter. Each pair is returned once."""

    def __init__(self, config: AdapterConfig, part: Part, model: ModelConfig) -> None:
        self._config = config
        self._part = part
        self._model = model
        try:
            self._file = open_tensors(config.folder / WEIGHTS)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{config.title}: {error}") from error
        self._left: set[str] = {*self._file.keys()}
        if not self._left:
            raise InvalidCheckpoint(f"{config.title}: {WEIGHTS} has no tensors")

    def take(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> _LowRank | None:
        """The rank's part of what the adapter adds to the projections `parts` of one input; None: nothing. The A of
        several projections are stacked, and each B has the columns of its own."""
        pairs = [self._pair(name, size, in_features) for name, size in parts.items()]
        ranks = [0 if down is None else len(down) for down, _ in pairs]
        if not any(ranks):
            return None
        ups = [
            torch.nn.functional.pad(up, (sum(ranks[:place]), sum(ranks[place + 1 :])))
            for place, (_, up) in enumerate(pairs)
        ]
        downs = [down for down, _ in pairs if down is not None]
        down, up = (torch.cat(stacked).to(device=device, dtype=dtype) for stacked in (downs, ups))
        if not (down.isfinite().all() and up.isfinite().all()):  # its requests would fail, and eject instances
            named = ", ".join(f"{name}.lora" for name in parts)
            raise InvalidCheckpoint(
                f"{self._config.title}: tensors of {named} have numbers that are not finite {dtype}"
            )
        return _LowRank(down, up)

    def _pair(self, name: str, out_features: int, in_features: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The rank's part of A, and of B times the scale: float32 [rank, in_features] and [out_features, rank], with
        rank 0 where the adapter leaves the projection as it is."""
        names = [f"{_PREFIX}{name}.lora_{letter}.weight" for letter in "AB"]
        cut = cut_of(self._part, self._model, f"{name}.weight", (out_features, in_features))
        if self._left.isdisjoint(names):
            return None, torch.zeros((out_features if cut is None or cut[0] else cut[2], 0))
        down, up = map(self._read, names)
        rank = max((1, *down.shape[:1]))
        for tensor_name, tensor, shape in zip(
            names, (down, up), ((rank, in_features), (out_features, rank)), strict=True
        ):
            if tuple(tensor.shape) != shape:
                raise InvalidCheckpoint(
                    f"{self._config.title}: tensor {shown(tensor_name)} has shape {list(tensor.shape)}; the model's "
                    f"layer requires {list(shape)}"
                )
        self._left.difference_update(names)
        up = up * self._config.scale(rank)
        if cut is not None:  # of the inputs or of the outputs
            down, up = (down.narrow(*cut), up) if cut[0] else (down, up.narrow(*cut))
        return down, up

    def _read(self, name: str) -> torch.Tensor:
        """float32."""
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise InvalidCheckpoint(f"{self._config.title}: tensor {shown(name)} cannot be read: {error}") from error
        if tensor.dtype not in _READABLE:
            raise InvalidCheckpoint(
                f"{self._config.title}: tensor {shown(name)} is {tensor.dtype}; supported: {_READABLE}"
            )
        return tensor.float()

    def finish(self) -> None:
        """See `Adapters.finish`."""
        elsewhere = tuple(_PREFIX + name for name in of_other_stages(self._part, self._model.num_layers))
        left = sorted(name for name in self._left if not name.startswith(elsewhere))
        if left:
            named = shortened([shown(name.removeprefix(_PREFIX)) for name in left])
            raise UnsupportedModel(
                f"{self._config.title}: {WEIGHTS} has tensors that are not supported: {named}; supported: those of "
                f"{_SUPPORTED}"
            )
