// Shared memory of the Hopper GEMM: the stages that operands pass through, in the layout that wgmma expects.
//
// A stage holds 128 x 64 of A and 64 x N of B as panels of 64 x 64 elements, 8 KB each: 64 lines of 128 bytes, with 16-byte piece c of
// line r at c ^ (r % 8) ("128B swizzle", which TMA writes and wgmma reads; PTX ISA, "Shared memory matrix layout"). A line is a row of A
// or a column of B if the operand is contiguous along K (K-major), and a step of K if it is contiguous along M or N (MN-major). One box
// of 64 x 64 elements thus serves both uses of a weight.
//
// Descriptors (PTX ISA, "Matrix descriptor format"), with 128B swizzle:
// - K-major: the stride offset is the distance between groups of 8 lines, 1024 bytes, also across panels, because the panels of an
//   operand are contiguous. The leading offset is unused. 16 steps of K are 32 bytes inside the 128-byte line: the hardware swizzles
//   address bits, so the start address moves by 32.
// - MN-major: the leading offset is the distance between groups of 64 elements of M or N, one panel; the stride offset that between
//   groups of 8 steps of K, 1024 bytes. 16 steps of K are 16 lines, 2048 bytes.
#pragma once
#include "epilogue.h"
#include "gemm.h"
#include "platform.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

constexpr u32 TILE_M = 128, TILE_K = 64;
constexpr u32 PANEL = 64;               // lines per panel, and elements per line
constexpr u32 PANEL_BYTES = 64 * 128;
constexpr u32 A_BYTES = TILE_M / PANEL * PANEL_BYTES;

// Offset of 16-byte piece `piece` of line `line` in a panel.
DEVICE u32 swizzled(u32 line, u32 piece) { return line * 128 + ((piece ^ (line & 7)) << 4); }

// wgmma descriptor of an operand whose panels begin at `panels`, for the first 16 steps of the stage's K.
template <bool MN_MAJOR> DEVICE u64 descriptor(const char* panels) {
    return MN_MAJOR ? dev::smem_descriptor(panels, PANEL_BYTES, 1024) : dev::smem_descriptor(panels, 16, 1024);
}
// The descriptor `bytes` after `first`, at the k16-th group of 16 steps of K. One addition to the lower word is enough, since no address
// exceeds its 14 bits.
template <bool MN_MAJOR> DEVICE u64 descriptor_at(u64 first, u32 bytes, u32 k16) {
    return first >> 32 << 32 | (u32(first) + bytes / 16 + k16 * (MN_MAJOR ? 128 : 2));
}

// Roles in a block of 384 threads. A warpgroup begins at a multiple of 4 warps.
constexpr u32 THREADS = 384;
// The producer warpgroup: two warps load rows, one loads weights by TMA (or copies rows if a task has none), one runs the scheduler.
constexpr u32 ROW_WARPS = 2, LOAD_WARPS = 3, SCHEDULER_WARP = 3;
constexpr u32 PRODUCERS = 128, CONSUMERS = 256, CONSUMER_WARPS = CONSUMERS / 32;
constexpr u32 PRODUCER_BARRIER = 1, CONSUMER_BARRIER = 2;  // named barriers

// A task on its way from the scheduler to loaders and consumers. There are two entries, so that the next tile is loaded during an
// epilogue.
constexpr u32 ENTRIES = 2;
struct Entry {
    GemmTask task;
    u32 more;  // 0: end of the queue, `task` is invalid
};
static_assert(sizeof(Entry) % 8 == 0 && alignof(Entry) == 8, "copied in words of 8 bytes");
// Slots for the completion of tasks. A warp may defer its report of a task while another warp is two tasks ahead, but no further: the
// third task needs an entry that all warps have finished with.
constexpr u32 REPORTS = 4;

// A tile of 128 x N and a block's shared memory for it: stages, then each consumer warp's epilogue unit, then `Control`. N is 128 or 256.
// wgmma and the registers would also allow 192, but half of a tile's columns are gate's and half are up's, and 96 is not a multiple of a
// box's 64. COUNT: blocks that share a tile, 1 or 2 (gemm_hopper_cta_pair.h).
template <u32 COLUMNS, u32 COUNT = 1> struct Tile {
    static_assert(COLUMNS == 128 || COLUMNS == 256, "whole boxes of gate and of up");
    static_assert(COUNT == 1 || COUNT == 2, "a block or a cluster of two");
    static constexpr bool CTA_PAIR = COUNT == 2;
    static constexpr u32 N = COLUMNS, STAGES = N == 256 ? 4 : 6;
    static constexpr u32 STORING_WARPS = COUNT * CONSUMER_WARPS;  // per task
    static constexpr u32 B_PANELS = N / PANEL, B_BYTES = B_PANELS * PANEL_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
    static_assert(A_BYTES == TILE_M * TILE_K * 2 && B_BYTES == N * TILE_K * 2, "panels cover the tile");

    struct Control {
        u64 full[STAGES];    // operands have arrived: an arrival of each thread of a loading warp, and TMA's bytes
        u64 empty[STAGES];   // operands have been read: an arrival of each consumer warp, of both blocks of a CTA pair
        u64 filled[ENTRIES];  // an entry is filled: an arrival of the scheduler
        // an entry has been read: an arrival of each loading and consumer warp; in a CTA pair's first block also of the second's
        // consumers
        u64 done[ENTRIES];
        u64 offered[ENTRIES];  // in the second block of a CTA pair: the first block's entry is filled, an arrival of its scheduler
        Entry entry[ENTRIES];
        DoneCounters done_counters[REPORTS];   // counters to increment when the task is done
        u32 finished[REPORTS];  // consumer warps that have reported their part, over all tasks; for a CTA pair of both blocks, in the first
        u32 deferred[CONSUMER_WARPS];  // a consumer warp's deferred report: 1 + its slot of REPORTS; 0: none
        float row_sums[TILE_M];
        u32 requested;           // scheduler: number of entries filled
        RowSource<Bf16> rows[LOAD_WARPS];  // per loading warp
        u32 copied_until;    // last loading warp of a CTA pair: in stages before this one, threads of the other block may have copied data
    };

    static constexpr u32 UNITS_AT = STAGES * STAGE_BYTES;
    static constexpr u32 CONTROL_AT = UNITS_AT + CONSUMER_WARPS * UNIT_BYTES;
    static constexpr u32 SHARED_BYTES = CONTROL_AT + sizeof(Control);
    static_assert(SHARED_BYTES <= 226 * 1024, "leaves the kernel 1 KB of a block's 227");
};

// For the n-th use of COUNT slots in round-robin order: the slot, and the parity of phase n / COUNT of its barrier.
template <u32 COUNT> DEVICE u32 nth(u32 n) { return n % COUNT; }
template <u32 COUNT> DEVICE u32 parity(u32 n) { return n / COUNT & 1; }

}  // namespace hopper
}  // namespace aristos
#endif
