"""LoRA adapters: low-rank additions to the linear layers of a native decoder, chosen by each request.

    y = x W^T + scale * (x A^T) B^T        (Hu et al. 2021, arXiv 2106.09685)

The product with W is computed once for all tokens of a step, whatever their adapters. An adapter is a folder in PEFT's
form: adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError

from engine.adapter_config import WEIGHTS, AdapterConfig
from engine.attention.compilation import multiplies_pairs
from engine.attention.cpu import is_compiled_for
from engine.attention.openmp import launcher, launcher_for
from engine.attention.simd import WIDTH
from engine.errors import InvalidCheckpoint, UnsupportedModel, shown
from engine.models.adapter_kernels import RANKS, VECTORS, add_address, order_address, project_address
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
        self.are_compiled = True
        """In all layers, so that the launches of a step do not depend on its adapters."""
        self._tokens: torch.Tensor | None = None
        self._order: torch.Tensor | None = None
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
        self._tokens = None if tokens is None else tokens.contiguous()
        self._order = self._groups = None

    @property
    def order(self) -> torch.Tensor:
        """int64 [num_tokens]: the tokens of a step on CPU, some of which have an adapter, adapter by adapter."""
        if self._order is None:
            assert self._tokens is not None
            self._order, ends = torch.empty_like(self._tokens), self._tokens.new_empty(self._num_adapters + 1)
            places = (one.data_ptr() for one in (self._tokens, self._order, ends))
            arguments = _OrderArguments(0, len(self._tokens), self._num_adapters, *places)
            launcher(order_address())(None, arguments)
        return self._order

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
        if not any(pairs):
            return base
        if CompiledAdapters.supports(pairs):
            return CompiledAdapters(base, pairs, self)
        self.are_compiled = False
        return GroupedAdapters(base, pairs, self)

    def finish(self) -> None:
        """Closes the files. Raises UnsupportedModel if tensors were not taken, but for those of other stages."""
        for file in self._files:
            file.finish()
        self._files.clear()


_BLOCK = 4 * VECTORS
"""Vectors of outputs of a task."""
_Arguments = ctypes.c_int64 * 15
_OrderArguments = ctypes.c_int64 * 6
_project_of, _add_of = (
    {in_pairs: functools.partial(address_of, in_pairs=in_pairs) for in_pairs in (False, True)}
    for address_of in (project_address, add_address)
)
_LowRank = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in_features], and B times the scale [out_features, rank], of one adapter and one projection, with rank 0
where the adapter leaves it as it is."""
_Pairs = Sequence[Sequence[_LowRank] | None]
"""By index of the adapter, of each projection of a layer; None: the adapter leaves all of them as they are."""


class CompiledAdapters:
    """A linear layer, and what its tokens' adapters add, by kernels that read the adapters in use alone: two launches,
    which are the same in each step, so that it can be recorded. A token's bits depend neither on the other tokens nor
    on their adapters."""

    def __init__(self, base: Linear, pairs: _Pairs, adapters: Adapters) -> None:
        self._base = base
        self._adapters = adapters
        dtype = _first(pairs)[0][0].dtype
        in_pairs = dtype == torch.bfloat16 and multiplies_pairs()
        self._per_number = 2 if in_pairs else 1
        self._matrices: list[torch.Tensor] = []  # to which the table points
        self._num_fields = 2 + 3 * len(_first(pairs))
        entries = [self._entry(pair) for pair in pairs]
        self._table = torch.tensor(entries, dtype=torch.int64, device="cpu")
        self._blocks = torch.tensor(_blocks([len(up) // WIDTH for _, up in _first(pairs)]), device="cpu")
        widest = int(self._table[:, 1].max())
        self._low_size = -(-widest // RANKS) * RANKS
        self._low_dtype = torch.bfloat16 if in_pairs else torch.float32
        self._project = launcher_for(_project_of[in_pairs], dtype)
        self._add = launcher_for(_add_of[in_pairs], dtype)
        order_address()  # compiled now, not while streams wait for their next token

    @staticmethod
    def supports(pairs: _Pairs) -> bool:
        """On CPU, whole vectors of inputs and outputs."""
        down, _ = _first(pairs)[0]
        size = 2 * WIDTH if down.dtype == torch.bfloat16 and multiplies_pairs() else WIDTH
        are_whole = down.shape[1] % size == 0 and all(len(up) % WIDTH == 0 for _, up in _first(pairs))
        return down.device.type == "cpu" and is_compiled_for(down.dtype) and are_whole

    def _entry(self, pairs: Sequence[_LowRank] | None) -> list[int]:
        """The adapter's row of the table."""
        if pairs is None:
            return [0] * self._num_fields
        whole = [_with_whole_numbers(*pair, self._per_number) for pair in pairs]
        down = self._kept(torch.cat([down for down, _ in whole]).unflatten(1, (-1, WIDTH, self._per_number)), RANKS)
        entry, place = [down.data_ptr(), sum(len(down) for down, _ in whole)], 0
        for _, up in whole:
            by_vector = up.unflatten(0, (-1, WIDTH)).unflatten(2, (-1, self._per_number)).transpose(1, 2)
            num_numbers = by_vector.shape[1]
            entry += [place, num_numbers, self._kept(by_vector, VECTORS).data_ptr()]
            place += num_numbers
        return entry

    def _kept(self, matrix: torch.Tensor, panel: int) -> torch.Tensor:
        """[items, numbers, 16, elements of a number] in panels of so many items, each number by number."""
        self._matrices.append(torch.cat([one.transpose(0, 1).flatten() for one in matrix.split(panel)]))
        return self._matrices[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        y, tokens = self._base(x), self._adapters.tokens
        num_rows = len(x)
        if tokens is None or not num_rows:
            return y
        x, order, table = x.contiguous(), self._adapters.order, self._table
        low = torch.empty((num_rows, self._low_size), dtype=self._low_dtype, device="cpu")
        num_threads = torch.get_num_threads()
        chunk = 4 if num_rows <= 64 * num_threads else 32
        num_parts = min(4, -(-2 * num_threads * chunk // num_rows))
        rows = num_rows, chunk, num_parts, order.data_ptr(), tokens.data_ptr()
        common = 0, *rows, len(table), table.data_ptr(), table.shape[1]
        inputs = x.shape[1] // self._per_number, x.data_ptr()
        self._project(num_threads, _Arguments(*common, *inputs, self._low_size, low.data_ptr()))
        blocks = self._blocks.data_ptr(), len(self._blocks)
        numbers = self._low_size // self._per_number, low.data_ptr()
        self._add(num_threads, _Arguments(*common, *blocks, *numbers, y.shape[1], y.data_ptr()))
        return y


class GroupedAdapters:
    """The same by torch, where there are no kernels: two products for each adapter in use, of its tokens alone."""

    def __init__(self, base: Linear, pairs: _Pairs, adapters: Adapters) -> None:
        self._base = base
        self._adapters = adapters
        self._pairs = [None if pair is None else _as_layers(pair) for pair in pairs]

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


def _first(pairs: _Pairs) -> Sequence[_LowRank]:
    """Those of the first adapter that has any."""
    return next(pair for pair in pairs if pair is not None)


def _as_layers(pairs: Sequence[_LowRank]) -> tuple[Linear, Linear]:
    """All projections as one: each B has the columns of its own A."""
    downs, ups = zip(*pairs, strict=True)
    return make_linear(torch.cat(downs)), make_linear(torch.block_diag(*ups))


def _with_whole_numbers(down: torch.Tensor, up: torch.Tensor, per_number: int) -> _LowRank:
    """With one more rank of zeros where they are not a multiple of `per_number`."""
    missing = -len(down) % per_number
    return torch.nn.functional.pad(down, (0, 0, 0, missing)), torch.nn.functional.pad(up, (0, missing))


def _blocks(sizes: Sequence[int]) -> list[list[int]]:
    """The tasks of `add_address` for projections of so many vectors of outputs."""
    starts = itertools.accumulate([0, *sizes])
    return [
        [projection, start * WIDTH, first, min(_BLOCK, size - first), size]
        for projection, (start, size) in enumerate(zip(starts, sizes, strict=False))
        for first in range(0, size, _BLOCK)
    ]


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

    def take(self, parts: Mapping[str, int], in_features: int) -> list[_LowRank] | None:
        """The rank's part of what the adapter adds to each of the projections `parts` of one input; None: nothing."""
        pairs = [self._pair(name, size, in_features) for name, size in parts.items()]
        if not any(len(down) for down, _ in pairs):
            return None
        pairs = [(down.to(self._device, self._dtype), up.to(self._device, self._dtype)) for down, up in pairs]
        if not all(matrix.isfinite().all() for pair in pairs for matrix in pair):  # each of its requests would fail
            named = ", ".join(f"{name}.lora" for name in parts)
            raise InvalidCheckpoint(
                f"{self._config.title}: tensors of {named} have numbers that are not finite {self._dtype}"
            )
        return pairs

    def _pair(self, name: str, out_features: int, in_features: int) -> _LowRank:
        """The rank's part of A, and of B times the scale, float32."""
        names = [f"{_PREFIX}{name}.lora_{letter}.weight" for letter in "AB"]
        cut = cut_of(self._part, self._model, f"{name}.weight", (out_features, in_features))
        if self._left.isdisjoint(names):
            return _of_this_rank(torch.zeros((0, in_features)), torch.zeros((out_features, 0)), cut)
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
        return _of_this_rank(down, up * self._config.scale(rank), cut)

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


def _of_this_rank(down: torch.Tensor, up: torch.Tensor, cut: tuple[int, int, int] | None) -> _LowRank:
    """`cut`: of the inputs or of the outputs."""
    if cut is None:
        return down, up
    return (down.narrow(*cut), up) if cut[0] else (down, up.narrow(*cut))
