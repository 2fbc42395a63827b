# SPDX-License-Identifier: Apache-2.0
"""The op, under the built-in op's name."""

from std.sys.info import size_of

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from nn.argmaxmin import argmax
from nn.topk import fused_token_sampling_cpu, fused_token_sampling_gpu

from .kernels import sample_rows


@register("sampler.fused_token_sampling")
struct FusedTokenSampling:
    """Samples a token a row, under temperature, top-k, top-p and min-p.

    On NVIDIA GPUs a row with 1 <= k < 32 costs one read of its logits. Tokens
    follow the built-in's distribution (see `draw`); with k = 1 the token is
    the argmax, at the lowest index. Rows with another k get the built-in's
    tokens. On other devices this is the built-in op.
    """

    @staticmethod
    def execute[
        dtype: DType,
        rank: Int,
        out_idx_type: DType,
        target: StaticString,
        _trace_name: StaticString,
    ](
        tokens: OutputTensor[dtype=out_idx_type, rank=rank, ...],
        top_k: InputTensor[dtype=DType.int64, rank=1, ...],
        max_k: Scalar,
        temperature: InputTensor[dtype=DType.float32, rank=1, ...],
        top_p: InputTensor[dtype=DType.float32, rank=1, ...],
        min_top_p: Float32,
        min_p: InputTensor[dtype=DType.float32, rank=1, ...],
        seed: InputTensor[dtype=DType.uint64, rank=1, ...],
        logits: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Samples.

        `max_k` and `min_top_p` are host values that a replay of a captured
        graph does not renew. On NVIDIA GPUs they decide nothing: a k below 1
        means all tokens.

        Args:
            tokens: Out, [..., 1].
            top_k: [rows].
            max_k: The greatest k, or -1 if a row has none.
            temperature: [rows].
            top_p: [rows].
            min_top_p: The least p.
            min_p: [rows].
            seed: [rows].
            logits: [..., vocabulary].
            ctx: The device.
        """
        comptime if is_cpu[target]():
            # Also the built-in's choice: far cheaper than a general top-k.
            if max_k == 1:
                argmax(
                    logits.to_tile_tensor[.int64](),
                    rank - 1,
                    tokens.to_tile_tensor[.int64](),
                )
                return
            fused_token_sampling_cpu(
                Int(max_k),
                logits.to_tile_tensor[.int64](),
                tokens.to_tile_tensor[.int64](),
                k=top_k.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                temperature=temperature.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                top_p=top_p.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                seed=seed.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
            )
        elif (
            ctx.target.is_nvidia_gpu()
            and rank == 2
            and out_idx_type == DType.int64
            and size_of[dtype]() <= 4
        ):
            sample_rows(
                ctx,
                tokens.unsafe_ptr()
                .unsafe_bitcast[Int64]()
                .as_unsafe_any_origin(),
                logits.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                top_k.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                temperature.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                top_p.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                min_p.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                seed.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                logits.dim_size(0),
                logits.dim_size(1),
            )
        else:
            fused_token_sampling_gpu(
                ctx,
                Int(max_k),
                min_top_p,
                logits.to_tile_tensor[.int64](),
                tokens.to_tile_tensor[.int64](),
                k=top_k.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                temperature=temperature.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                top_p=top_p.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                min_p=min_p.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
                seed=seed.to_tile_tensor[.int64]()
                .as_unsafe_any_origin()
                .as_imm(),
            )
