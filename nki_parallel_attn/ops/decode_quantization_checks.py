"""What the quantisation types of attention_block_tkg ask of the two projections' weights and scales."""

from __future__ import annotations

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedFeatureError
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments, BlockSizes
from nki_parallel_attn.topology.types import QuantizationType


def check_qkv_quantization(args: BlockArguments, sizes: BlockSizes) -> None:
    """Check W_qkv and its scales."""
    if args.quantization_type_qkv is not QuantizationType.NONE:
        raise UnsupportedFeatureError("quantization_type_qkv: only NONE so far")
    _check_unquantized(args, "qkv")


def check_out_quantization(args: BlockArguments, hidden: int) -> None:
    """Check W_out and its scales; H = `hidden`."""
    if args.quantization_type_out is not QuantizationType.NONE:
        raise UnsupportedFeatureError("quantization_type_out: only NONE so far")
    _check_unquantized(args, "out")


def _check_unquantized(args: BlockArguments, which: str) -> None:
    weight = getattr(args, f"W_{which}")
    if weight.dtype != args.X.dtype:
        raise ArgumentTypeError(f"W_{which}", weight.dtype, f"X's dtype {args.X.dtype} with NONE")
    for name in (f"weight_dequant_scale_{which}", f"input_dequant_scale_{which}"):
        if getattr(args, name) is not None:
            raise ArgumentError(name, "a tensor", f"None with quantization_type_{which}=NONE")
