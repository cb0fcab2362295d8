"""Decoders without a native implementation, computed by transformers over our paged KV.

Each step is one sequence: the tokens of all requests side by side, with their positions. transformers calls `_attend`
as its attention implementation; it writes keys and values into the pages and attends over them. A layer's heads, window
and soft cap are not read from config.json, whose fields differ by architecture: the model is built on the meta device,
without memory, and one forward records each layer's call and evaluates its mask.

Linear layers are packed as those of the native models: faster, and row by row (engine/models/linear.py).
The only module that imports transformers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.pytorch_utils import Conv1D

from engine.attention import AttentionBackend, AttentionMetadata
from engine.config import Quantization
from engine.errors import InvalidCheckpoint, UnsupportedModel, shown
from engine.models import LastTokens
from engine.models.config import SUPPORTED_DTYPES, DecoderConfig, read_json
from engine.models.linear import Linear, make_linear
from engine.models.transformers_experts import pack_experts
from engine.models.weights import DummyWeights, shortened

_ATTENTION, _PROBE = "tandem", "tandem-probe"
_NO_INTERFACE = "transformers has no attention interface for it"
_PROBE_TOKENS = 4
_SUPPORTED_OPTIONS = frozenset(
    {
        "dropout",
        "is_causal",
        "output_router_logits",
        "position_ids",
        "s_aux",
        "scaling",
        "sliding_window",
        "softcap",
        "use_cache",
    }
)
"""Keyword arguments of an attention call that are supported, or have no effect here."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_WITH_TEXT_PART = ("Gemma3ForConditionalGeneration",)
"""Architectures with parts for images of which the text decoder runs; their tests compare each token."""
_OLD_BUFFERS = (".attn.masked_bias",)
"""Ends of the names of tensors that no decoder reads: constants of masks, which old releases of transformers saved."""
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's attention as transformers calls it."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    softcap: float | None
    window: int | None
    has_sinks: bool


def read_config(folder: Path) -> DecoderConfig:
    """The shape of the checkpoint's decoder. Raises UnsupportedModel, naming the architecture, for one that cannot be
    served exactly."""
    raw = read_json(folder / "config.json")
    name = shown(", ".join(map(str, raw.get("architectures") or [])) or None)
    try:
        config = _load_config(folder)
        calls = _record_calls(config)
        return _describe(config, calls)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"architecture {name} is not supported by the transformers backend: {error}") from None
    except Exception as error:  # of any type: transformers validates where it uses a field
        if error.args == (_PROBE,):  # GPT-J and GPT-Neo have a table of classes by the interface's name
            raise UnsupportedModel(
                f"architecture {name} is not supported by the transformers backend: {_NO_INTERFACE}"
            ) from None
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        raise UnsupportedModel(
            f"architecture {name} is not supported: transformers {transformers.__version__} cannot build it ({reason})"
        ) from error


class TransformersModel:
    """A model of transformers with the interface of `LlamaModel`. Used by one thread."""

    def __init__(
        self,
        config: DecoderConfig,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
        dummy_seed: int | None,
        quantization: Quantization = "none",
    ) -> None:
        """`dummy_seed`: None for the checkpoint's weights. Raises InvalidCheckpoint for tensors that do not fit,
        UnsupportedModel for experts that shall be quantised."""
        self.config = config
        self.attention_name = attention.name
        self._attention = attention
        self._model = (
            _load_weights(folder, dtype) if dummy_seed is None else _dummy_model(folder, dtype, dummy_seed)
        ).to(device)
        if device.type == "cpu":
            pack_experts(self._model, quantization)
        _pack_linear_layers(self._model, quantization)
        if dummy_seed is None and device == torch.device("cpu"):
            _own_memory(self._model)
        self._decoder = self._model.get_decoder()
        self._decoder_place, self._given_hidden = _place(self._model, self._decoder), _GivenHidden()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`. All tokens are computed."""
        del needed, adapters
        token = _step.set(_Step(self._attention, kv_cache, metadata, self.config.sliding_windows))
        try:
            output = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            _step.reset(token)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]. Without its decoder the model is all that follows:
        the output layer with the scaling and capping of the architecture."""
        setattr(*self._decoder_place, self._given_hidden)
        try:
            logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        finally:
            setattr(*self._decoder_place, self._decoder)
        return logits[0].float()


# The attention of a step


@dataclass(frozen=True, slots=True)
class _Step:
    attention: AttentionBackend
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    windows: tuple[int | None, ...]


_step: ContextVar[_Step] = ContextVar("_step")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_options: object,
) -> tuple[torch.Tensor, None]:
    """query [1, num_heads, num_tokens, head_dim], key and value alike -> [1, num_tokens, num_heads, value_dim].
    `s_aux`: sinks [num_heads]."""
    step, head_dim, value_dim = _step.get(), query.shape[-1], value.shape[-1]
    if value_dim < head_dim:
        value = torch.nn.functional.pad(value, (0, head_dim - value_dim))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = step.attention.forward(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.kv_cache,
        layer=layer,
        metadata=step.metadata,
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=step.windows[layer],
        sinks=None if s_aux is None else s_aux.float(),
    )
    return output[None, ..., :value_dim], None


# What the layers call


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a layer gets as mask while calls are recorded."""

    window: int | None


_calls: ContextVar[list[_Call]] = ContextVar("_calls")


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for `_attend` on the meta device."""
    unknown = sorted(name for name, given in options.items() if given is not None and name not in _SUPPORTED_OPTIONS)
    if unknown:
        raise UnsupportedModel(f"its attention takes {', '.join(unknown)}")
    if not isinstance(attention_mask, _Mask):
        raise UnsupportedModel("its attention has a mask of its own")
    window, sinks = options.get("sliding_window"), options.get("s_aux")
    if window is not None and window != attention_mask.window:
        raise UnsupportedModel(f"a layer has a window of {window} and a mask of {attention_mask.window}")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise UnsupportedModel(f"its sinks have the shape {tuple(sinks.shape)}")
    _calls.get().append(
        _Call(
            layer=int(getattr(module, "layer_idx", -1)),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            softcap=options.get("softcap"),
            window=attention_mask.window,
            has_sinks=sinks is not None,
        )
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _recorded_mask(*, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any) -> _Mask:
    """The window of a mask, which must be causal with or without one."""
    window = local_size
    far = _PROBE_TOKENS if window is None else 2 * window + 1
    keys = torch.arange(far + 2, device="cpu")
    for position in {0, far // 2, far}:
        visible = mask_function(keys[0], keys[0], keys[position], keys)
        expected = (keys <= position) & (keys > position - (far + 2 if window is None else window))
        if not torch.equal(torch.broadcast_to(visible, keys.shape), expected):
            raise UnsupportedModel("its attention is neither causal nor of a sliding window")
    return _Mask(window)


transformers.AttentionInterface.register(_ATTENTION, _attend)
transformers.AttentionInterface.register(_PROBE, _record)
AttentionMaskInterface.register(_PROBE, _recorded_mask)
transformers.utils.logging.disable_progress_bar()


def _record_calls(config: transformers.PreTrainedConfig) -> list[_Call]:
    """One forward of a few tokens on the meta device."""
    calls: list[_Call] = []
    token = _calls.set(calls)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # the type below is written into it
                dtype=torch.bfloat16,  # the one type for which experts in one product have a meta kernel
                attn_implementation=_PROBE,
            )
            if (built := type(model).__name__) not in config.architectures:
                raise UnsupportedModel(f"its model_type is that of {built}")
            _refuse_state(model)
            _refuse_rope(model)
            if not model.is_backend_compatible():
                raise UnsupportedModel(_NO_INTERFACE)
            _refuse_positions(model)
            tokens = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long)
            positions = torch.arange(_PROBE_TOKENS)[None]
            mask = torch.ones_like(tokens, device="cpu")  # hybrid architectures read its values
            model.eval()(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    finally:
        _calls.reset(token)
    return calls


def _refuse_state(model: Any) -> None:
    """By the layers themselves: in Falcon-H1 each has attention and such a state, and Granite 4.0 Micro, of a hybrid
    architecture, has none."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    kinds = {kind for kind in layer_types if _has_state(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object))}
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", decoder)  # beside them may be an encoder of audio: Phi-4-multimodal
    kinds |= {"Conv1d" for module in layers.modules() if isinstance(module, torch.nn.Conv1d)}
    if kinds:
        raise UnsupportedModel(
            f"its layers keep a state of recurrence or convolution ({', '.join(sorted(kinds))}); "
            "supported: attention alone, whose keys and values are in the KV cache"
        )


def _has_state(cache_layer: type) -> bool:
    return issubclass(cache_layer, LinearAttentionCacheLayerMixin)


def _refuse_positions(model: Any) -> None:
    """The positions of a request are 0, 1, 2…, and a decoder takes them as they are."""
    decoder = model.get_decoder()
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedModel(
            f"its decoder, as transformers names it ({type(decoder).__name__}), takes no position_ids"
        )
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedModel(
                f"its positions begin after the padding id ({type(module).__name__}); "
                "supported: decoders whose positions begin at 0"
            )


def _refuse_rope(model: torch.nn.Module) -> None:
    """By what the layers make of config.json: Phi-3 reads yarn as longrope, and HunYuan's dynamic with an alpha is
    static."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:  # by the type of layer
            if kind in _LENGTH_DEPENDENT_ROPE:
                raise UnsupportedModel(
                    f"RoPE type {kind!r} depends on the length of a request; cached keys cannot follow"
                )


def _describe(config: transformers.PreTrainedConfig, calls: list[_Call]) -> DecoderConfig:
    text = config.get_text_config()
    if not calls or len(calls) != text.num_hidden_layers:
        raise UnsupportedModel(f"{len(calls)} of its {text.num_hidden_layers} layers have attention of the usual kind")
    first = calls[0]
    by_layer: dict[str, Any] = {"layer": 0, "window": None, "has_sinks": False}
    for index, call in enumerate(calls):
        if replace(call, **by_layer) != replace(first, **by_layer):
            raise UnsupportedModel("its layers have heads of different sizes or numbers")
        if call.layer != index:
            raise UnsupportedModel("its layers are not numbered in order")
    if first.num_heads % first.num_kv_heads:
        raise UnsupportedModel(
            f"its {first.num_heads} attention heads do not divide evenly among {first.num_kv_heads} key/value heads"
        )
    if first.value_dim > first.head_dim:
        raise UnsupportedModel("its values are longer than its keys")
    dtype = str(config.dtype or text.dtype or torch.float32).removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise UnsupportedModel(f"weights of dtype {dtype}; supported: {', '.join(SUPPORTED_DTYPES)}")
    return DecoderConfig(
        architecture=config.architectures[0],
        vocab_size=text.vocab_size,
        num_layers=len(calls),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_position_embeddings=text.max_position_embeddings,
        sliding_windows=tuple(call.window for call in calls),
        softcap=first.softcap,
        has_sinks=any(call.has_sinks for call in calls),
        torch_dtype=dtype,
    )


# Loading


def _load_config(folder: Path) -> transformers.PreTrainedConfig:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not config.architectures:
        raise UnsupportedModel("config.json names no architecture")
    if config.get_text_config() is not config and config.architectures[0] not in _WITH_TEXT_PART:
        raise UnsupportedModel(
            "it has parts beside its text decoder, as for images or audio; "
            f"supported: text decoders, and that of {', '.join(_WITH_TEXT_PART)}"
        )
    if codes := getattr(config, "quantization_config", None):  # MXFP4, see `are_mxfp4`
        config.quantization_config = {**codes, "dequantize": True}
        config.dtype = config.dtype or torch.bfloat16  # as published, gpt-oss names none
    config.return_dict = config.get_text_config().return_dict = True  # whatever the checkpoint's author called
    return config


def _load_weights(folder: Path, dtype: torch.dtype) -> Any:
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=_load_config(folder),
            dtype=dtype,
            attn_implementation=_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        raise InvalidCheckpoint(f"transformers cannot load the checkpoint: {first}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(name for name in map(str, found[problem]) if not name.endswith(_OLD_BUFFERS))
        if names:
            raise InvalidCheckpoint(f"tensors of the checkpoint: {problem}: {shortened(names)}")
    return _text_part(model).eval()


def _dummy_model(folder: Path, dtype: torch.dtype, seed: int) -> Any:
    config = _load_config(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    weights = DummyWeights(seed, dtype=dtype, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in _text_part(model).named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith(".weight")
            parameter.copy_(weights.take("norm.weight" if is_norm else name, tuple(parameter.shape)))
    return model.eval()


def _text_part(model: Any) -> Any:
    """`model` without what stands beside its decoder, such as the encoder of images: its memory is freed."""
    if model.config.get_text_config() is not model.config:
        owner, name = _place(model, model.get_decoder())
        for other in [child for child, _ in owner.named_children() if child != name]:
            setattr(owner, other, None)
    return model


def _place(model: torch.nn.Module, part: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The module that has `part`, and the part's name in it."""
    path = next(name for name, module in model.named_modules() if module is part)
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


class _Packed(torch.nn.Module):
    """A linear layer for inputs of any number of dimensions."""

    def __init__(self, linear: Linear, weight: torch.Tensor) -> None:
        """`weight`: that of the layer it replaces."""
        super().__init__()
        self._linear = linear
        self.weight = weight.new_empty(0)  # routers read its type; code that multiplies with it fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _pack_linear_layers(model: Any, quantization: Quantization) -> None:
    """Replaces every linear layer in place; a matrix shared with an embedding stays there too."""
    fused = [name for name, parameter in model.named_parameters() if parameter.dim() > _MATRIX]
    if fused and quantization != "none":
        raise UnsupportedModel(
            f"quantization {quantization} is not supported by the transformers backend for these experts ({fused[0]}); "
            "set none"
        )
    output_layer = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear or type(layer) is Conv1D:
                kept = "none" if layer is output_layer else quantization
                setattr(parent, name, _Packed(_packed(layer, kept), layer.weight.detach()))


def _own_memory(model: torch.nn.Module) -> None:
    """Copies, one by one, what no linear layer has taken: which may be views of the checkpoint's files. What is tied
    stays tied."""
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()


def _packed(layer: Any, quantization: Quantization) -> Linear:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if type(layer) is Conv1D:  # GPT-2's linear layer, transposed
        weight = weight.t().contiguous()
    return make_linear(weight, bias, quantization)


class _GivenHidden(torch.nn.Module):
    """Stands in for the decoder while logits are computed: its output is what it is given."""

    def forward(
        self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **_: object
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
        output.router_logits = None  # mixtures of experts read it
        return output
