"""LoRA adapters: low-rank additions to the linear layers of a native decoder, chosen by each request.

    y = x W^T + scale * (x A^T) B^T        (Hu et al. 2021, arXiv 2106.09685)

The product with W is computed once for all tokens of a step, whatever their adapters. An adapter is a folder in PEFT's
form: adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError

from engine.adapter_config import WEIGHTS, AdapterConfig
from engine.errors import InvalidCheckpoint, UnsupportedModel, shown
from engine.models.config import ModelConfig
from engine.models.linear import Linear, make_linear
from engine.models.weights import cut_of, of_other_stages, open_tensors, shortened
from engine.partition import Part

_PREFIX = "base_model.model."
_SUPPORTED = "q_proj, k_proj, v_proj, o_proj and, in layers without experts, gate_proj, up_proj and down_proj"
_READABLE = (torch.float32, torch.bfloat16, torch.float16)


class Adapters:
    """The adapters of one rank's part of a decoder, and which tokens of the current step have which. Used by one
    thread."""

    def __init__(
        self, folders: Mapping[str, str], part: Part, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`folders` by name: an adapter's index is its place among the sorted names. Raises InvalidCheckpoint,
        UnsupportedModel."""
        self.are_stacked = True
        """In all layers, so that the launches of a step do not depend on its adapters."""
        self._tokens: torch.Tensor | None = None
        self._groups: list[tuple[int, torch.Tensor]] | None = None
        configs = [AdapterConfig.read(name, folders[name]) for name in sorted(folders)]
        self._files = [_AdapterFile(one, part, config, dtype=dtype, device=device) for one in configs]
        self._num_adapters = len(self._files)

    @property
    def tokens(self) -> torch.Tensor | None:
        """The adapter of each token of the step, int64 [num_tokens], their number where it has none; None: no token has
        one. In the last layer of those tokens alone that are needed."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: torch.Tensor | None) -> None:
        self._tokens, self._groups = tokens, None

    @property
    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """Each adapter in use with the rows of its tokens, int64 [num_rows]."""
        if self._groups is None:
            tokens = torch.empty(0, dtype=torch.int64) if self._tokens is None else self._tokens
            used = [adapter for adapter in tokens.unique().tolist() if adapter < self._num_adapters]
            self._groups = [(adapter, (tokens == adapter).nonzero().flatten()) for adapter in used]
        return self._groups

    def added_to(self, base: Linear, parts: Mapping[str, int], in_features: int) -> Linear:
        """`base`, which has the projections `parts` (name -> output features of the whole model) of one input, with
        what adapters add to them. Raises InvalidCheckpoint for a tensor that does not fit."""
        pairs = [file.take(parts, in_features) for file in self._files]
        num_columns = sum(len(pair[0]) for pair in pairs if pair is not None)
        if num_columns == 0:
            return base
        if num_columns <= _MOST_STACKED:
            return StackedAdapters(base, pairs, self)
        self.are_stacked = False
        return GroupedAdapters(base, pairs, self)

    def finish(self) -> None:
        """Closes the files. Raises UnsupportedModel if tensors were not taken, but for those of other stages."""
        for file in self._files:
            file.finish()
        self._files.clear()


_MOST_STACKED = 256
"""Columns of all adapters together. More would make a step read as much for them as for a layer's weights."""
_LowRank = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in_features], and B times the scale [out_features, rank], of one adapter and all projections of a layer."""


class StackedAdapters:
    """A linear layer, and what its tokens' adapters add: two products for the A and the B of all adapters, between
    which a token keeps the columns of its own. The launches are the same in each step, so that it can be recorded. A
    token's bits depend neither on the other tokens nor on their adapters."""

    def __init__(self, base: Linear, pairs: Sequence[_LowRank | None], adapters: Adapters) -> None:
        """`pairs`: by index of the adapter."""
        self._base = base
        self._adapters = adapters
        downs, ups = zip(*(pair for pair in pairs if pair is not None), strict=True)
        down, up = torch.cat(downs), torch.cat(ups, dim=1)
        is_odd = len(down) % 2  # kernels of bfloat16 take pairs of inputs
        self._down = make_linear(torch.nn.functional.pad(down, (0, 0, 0, is_odd)))
        self._up = make_linear(torch.nn.functional.pad(up, (0, is_odd)))
        owners = [index for index, pair in enumerate(pairs) for _ in (pair[0] if pair is not None else ())]
        columns = torch.tensor([*owners, *[-1] * is_odd], device=down.device)
        self._is_others = columns != torch.arange(len(pairs) + 1, device=down.device)[:, None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        y, tokens = self._base(x), self._adapters.tokens
        if tokens is None:
            return y
        low = self._down(x).masked_fill_(self._is_others.index_select(0, tokens), 0)
        return y.add_(self._up(low))


class GroupedAdapters:
    """The same with two products for each adapter in use, of its tokens alone: for many adapters."""

    def __init__(self, base: Linear, pairs: Sequence[_LowRank | None], adapters: Adapters) -> None:
        """`pairs`: by index of the adapter."""
        self._base = base
        self._adapters = adapters
        self._pairs = [pair and (make_linear(pair[0]), make_linear(pair[1])) for pair in pairs]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        y = self._base(x)
        if self._adapters.tokens is None:
            return y
        for adapter, rows in self._adapters.groups:
            if (pair := self._pairs[adapter]) is not None:
                down, up = pair
                y.index_add_(0, rows, up(down(x.index_select(0, rows))))
        return y


class _AdapterFile:
    """The tensors of one adapter. Each pair is returned once."""

    def __init__(
        self, config: AdapterConfig, part: Part, model: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._part = part
        self._model = model
        self._dtype = dtype
        self._device = device
        try:
            self._file = open_tensors(config.folder / WEIGHTS)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{config.title}: {error}") from error
        self._left: set[str] = {*self._file.keys()}
        if not self._left:
            raise InvalidCheckpoint(f"{config.title}: {WEIGHTS} has no tensors")

    def take(self, parts: Mapping[str, int], in_features: int) -> _LowRank | None:
        """The rank's part of what the adapter adds to the projections `parts` of one input; None: nothing.
        The A of several projections are stacked, and each B has the columns of its own."""
        pairs = [self._pair(name, size, in_features) for name, size in parts.items()]
        ranks = [0 if down is None else len(down) for down, _ in pairs]
        if not any(ranks):
            return None
        ups = [
            torch.nn.functional.pad(up, (sum(ranks[:place]), sum(ranks[place + 1 :])))
            for place, (_, up) in enumerate(pairs)
        ]
        downs = [down for down, _ in pairs if down is not None]
        down, up = (torch.cat(stacked).to(self._device, self._dtype) for stacked in (downs, ups))
        if not (
            down.isfinite().all() and up.isfinite().all()
        ):  # zeros for other adapters' tokens would not remove them
            named = ", ".join(f"{name}.lora" for name in parts)
            raise InvalidCheckpoint(
                f"{self._config.title}: tensors of {named} have numbers that are not finite {self._dtype}"
            )
        return down, up

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
