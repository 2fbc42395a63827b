# SPDX-License-Identifier: Apache-2.0
"""`sampler.fused_token_sampling` of MAX 26.5, without the wait for the device.

The sampling is that of the installed `nn`, so the same seeds give the same
tokens. What goes is what follows it in 26.5 where the largest k is below 10: a
flag for each row is copied to the host, which waits for the device to read it
and raises an error if a row had no largest logit, as when all are NaN.
See https://github.com/modular/modular/pull/6813.

Where assertions are on (`MODULAR_DEBUG=assert-level=warn`, or `all` to stop at
the first), the device counts such rows and reports them itself.
"""

from extensibility import InputTensor, OutputTensor, register
from layout import Coord, TileTensor, row_major
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.info import is_cpu
from nn.argmaxmin import argmax
from nn.topk import (
    fused_token_sampling_cpu,
    fused_token_sampling_gpu,
    topk_gpu,
)
from std.builtin.debug_assert import ASSERT_MODE
from std.utils.index import IndexList

comptime _CHECKED = ASSERT_MODE == "all" or ASSERT_MODE == "warn"

comptime _WAITS_BELOW = 10
"""From this k on MAX samples by rejection, which has no wait."""


@register("sampler.fused_token_sampling")
struct FusedTokenSampling:
    """Samples a token from each row of logits."""

    @staticmethod
    def execute[
        dtype: DType, rank: Int, out_idx_type: DType, target: StaticString
    ](
        tokens: OutputTensor[dtype=out_idx_type, rank=rank, ...],
        k: InputTensor[dtype=DType.int64, rank=1, ...],
        max_k: Scalar,
        temperature: InputTensor[dtype=DType.float32, rank=1, ...],
        top_p: InputTensor[dtype=DType.float32, rank=1, ...],
        min_top_p: Float32,
        min_p: InputTensor[dtype=DType.float32, rank=1, ...],
        seed: InputTensor[dtype=DType.uint64, rank=1, ...],
        logits: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Enqueues the sampling on the device.

        On a GPU and with max_k below 10, a row in which MAX finds no largest
        logit gives token 0: all NaN, all -inf, or with NaN that hide the
        rest. Otherwise such a row gives what it gives in MAX.

        Parameters:
            dtype: Type of the logits.
            rank: Rank of the logits; 2 on a GPU.
            out_idx_type: Type of the tokens, int64.
            target: Where the op runs.

        Args:
            tokens: The tokens, `[batch, 1]`.
            k: How many of the largest logits take part, `[batch]`; -1 for
                max_k.
            max_k: The largest k, on the host; -1 for the whole vocabulary.
            temperature: What the logits are divided by, `[batch]`.
            top_p: Which share of the probability takes part, `[batch]`.
            min_top_p: The smallest top_p, on the host.
            min_p: The least probability that takes part, in terms of the
                largest, `[batch]`. On a CPU it is ignored, as in MAX.
            seed: Seeds of the random numbers, `[batch]`.
            logits: The logits, `[batch, vocabulary]`.
            ctx: The device.

        Raises:
            Error: If something cannot be enqueued.
        """
        comptime i64 = DType.int64
        var logits_ = logits.to_tile_tensor[i64]()
        var tokens_ = tokens.to_tile_tensor[i64]()
        var k_ = k.to_tile_tensor[i64]().as_unsafe_any_origin().as_immut()
        var temperature_ = (
            temperature.to_tile_tensor[i64]().as_unsafe_any_origin().as_immut()
        )
        var top_p_ = (
            top_p.to_tile_tensor[i64]().as_unsafe_any_origin().as_immut()
        )
        var min_p_ = (
            min_p.to_tile_tensor[i64]().as_unsafe_any_origin().as_immut()
        )
        var seed_ = seed.to_tile_tensor[i64]().as_unsafe_any_origin().as_immut()

        comptime if is_cpu[target]():
            if max_k == 1:
                argmax(
                    logits_, rank - 1, tokens_, Optional[DeviceContext](ctx)
                )
            else:
                fused_token_sampling_cpu(
                    Int(max_k),
                    logits_,
                    tokens_,
                    k=k_,
                    temperature=temperature_,
                    top_p=top_p_,
                    seed=seed_,
                )
        else:
            var everything = max_k == -1
            var bound = logits.dim_size(rank - 1) if everything else Int(max_k)
            if bound >= _WAITS_BELOW or (everything and min_top_p == 1):
                fused_token_sampling_gpu(
                    ctx,
                    Int(max_k),
                    min_top_p,
                    logits_,
                    tokens_,
                    k=k_,
                    temperature=temperature_,
                    top_p=top_p_,
                    min_p=min_p_,
                    seed=seed_,
                )
                return

            var rows = logits.dim_size(0)
            var values = ctx.enqueue_create_buffer[dtype](rows * bound)
            var flags: Optional[DeviceBuffer[DType.int8]] = None
            var valid: Optional[Pointer[Int8, MutAnyOrigin]] = None
            comptime if _CHECKED:
                flags = ctx.enqueue_create_buffer[DType.int8](rows)
                ctx.enqueue_memset(flags.value(), 1)
                valid = rebind[Pointer[Int8, MutAnyOrigin]](
                    flags.value().unsafe_ptr()
                )
            topk_gpu(
                ctx,
                bound,
                logits_,
                TileTensor(
                    values, row_major(Coord(IndexList[2](rows, bound)))
                ),
                tokens_,
                k=k_,
                temperature=temperature_,
                top_p=top_p_,
                min_p=min_p_,
                seed=seed_,
                valid=valid,
            )
            comptime if _CHECKED:
                ctx.enqueue_function[_report](
                    flags.value(), Int32(rows), grid_dim=1, block_dim=1
                )
            # The buffers live until everything that uses them is enqueued.
            _ = flags^
            _ = values^


def _report(valid: Pointer[Int8, ImmutAnyOrigin], rows: Int32):
    """Asserts, on the device, that every row had a largest logit."""
    var bad = Int32(0)
    for row in range(Int(rows)):
        bad += Int32(valid[unsafe_offset=row] == 0)
    debug_assert(
        bad == 0, bad, " of ", rows, " rows have no largest logit (NaN or -inf)"
    )
