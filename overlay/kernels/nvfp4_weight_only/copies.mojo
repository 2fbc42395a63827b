# SPDX-License-Identifier: Apache-2.0
"""Copies into shared memory, and the barriers that they complete on.

The standard library offers `cp.async.bulk` from sm_100 on; PTX has it from
sm_90 on (PTX ISA 8.7, 9.7.9.25.4.1).
"""

from std.sys._assembly import inlined_assembly

comptime Bytes = Pointer[UInt8, ImmUnsafeAnyOrigin]


@always_inline
def init_barrier(barrier: UInt32, arrivals: UInt32):
    """Makes a barrier in shared memory that so many arrivals complete."""
    inlined_assembly[
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        NoneType,
        constraints="r,r,~{memory}",
        has_side_effect=True,
    ](barrier, arrivals)


@always_inline
def publish_barriers():
    """Lets the copying unit see barriers that were just made."""
    inlined_assembly[
        "fence.mbarrier_init.release.cluster;",
        NoneType,
        constraints="~{memory}",
        has_side_effect=True,
    ]()


@always_inline
def arrive(barrier: UInt32):
    """Arrives at a barrier."""
    inlined_assembly[
        "mbarrier.arrive.shared::cta.b64 _, [$0];",
        NoneType,
        constraints="r,~{memory}",
        has_side_effect=True,
    ](barrier)


@always_inline
def arrive_and_expect(barrier: UInt32, bytes: UInt32):
    """Arrives, and has the barrier wait for so many copied bytes, too.

    For a whole warp, one lane of which arrives.
    """
    inlined_assembly[
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;
        }""",
        NoneType,
        constraints="r,r,~{memory}",
        has_side_effect=True,
    ](barrier, bytes)


@always_inline
def wait(barrier: UInt32, parity: UInt32):
    """Waits until the phase of that parity is complete."""
    while (
        inlined_assembly[
            """{
            .reg .pred done;
            mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
            selp.u32 $0, 1, 0, done;
            }""",
            UInt32,
            constraints="=r,r,r,~{memory}",
            has_side_effect=True,
        ](barrier, parity)
        == 0
    ):
        pass


@always_inline
def copy(
    to: UInt32,
    source: Bytes,
    bytes: UInt32,
    barrier: UInt32,
):
    """Starts a copy into shared memory; all three are multiples of 16.

    For a whole warp with the same arguments, one lane of which starts it: the
    instruction takes them from registers that a warp's lanes share, and lanes
    with their own would take turns of some fifty cycles.
    """
    inlined_assembly[
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];
        }""",
        NoneType,
        constraints="r,l,r,r,~{memory}",
        has_side_effect=True,
    ](to, source, bytes, barrier)


@always_inline
def barrier_of(threads: UInt32):
    """A barrier for the block's first threads, a multiple of 32."""
    inlined_assembly[
        "bar.sync 1, $0;",
        NoneType,
        constraints="r,~{memory}",
        has_side_effect=True,
    ](threads)


@always_inline
def arrive_when_copied(barrier: UInt32):
    """Arrives when this thread's `cp.async` copies so far are complete."""
    inlined_assembly[
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];",
        NoneType,
        constraints="r,~{memory}",
        has_side_effect=True,
    ](barrier)


@always_inline
def copy16(to: UInt32, source: Bytes):
    """Starts a copy of 16 bytes by this thread."""
    inlined_assembly[
        "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;",
        NoneType,
        constraints="r,l,~{memory}",
        has_side_effect=True,
    ](to, source)


@always_inline
def copy4(to: UInt32, source: Bytes):
    """Starts a copy of 4 bytes by this thread."""
    inlined_assembly[
        "cp.async.ca.shared.global [$0], [$1], 4;",
        NoneType,
        constraints="r,l,~{memory}",
        has_side_effect=True,
    ](to, source)


@always_inline
def publish_shared():
    """Lets the tensor cores see what this thread knows of shared memory."""
    inlined_assembly[
        "fence.proxy.async.shared::cta;",
        NoneType,
        constraints="~{memory}",
        has_side_effect=True,
    ]()
