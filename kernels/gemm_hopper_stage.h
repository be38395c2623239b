// Shared memory of the Hopper GEMM: the stages that operands pass through, and the layout that wgmma expects there.
//
// A stage holds 128 x 64 of A and 64 x N of B as panels of 64 x 64 elements, 8 KB each: 64 lines of 128 bytes, and in
// line r the 16-byte piece c lies at place c ^ (r % 8) ("128B swizzle": what TMA writes and wgmma reads; PTX ISA,
// "Shared memory matrix layout"). A line is a row of A or a column of B when the operand is contiguous along K (K-major),
// and a step of K when it is contiguous along M or N (MN-major). So one box of 64 x 64 elements serves both uses of a weight.
//
// Descriptors (PTX ISA, "Matrix descriptor format"), with 128B swizzle:
// - K-major: the stride offset is from 8 lines to the next 8 lines, 1024 bytes, across panels too, because the panels of
//   an operand are 64 consecutive lines each and lie one after the other. The leading offset is not used. 16 steps of K are
//   32 bytes inside the 128-byte line: the hardware applies the swizzle to address bits, so the start address moves by 32.
// - MN-major: the leading offset is from 64 elements of M or N to the next 64, one panel; the stride offset from 8 steps of
//   K to the next 8, 1024 bytes. 16 steps of K are 16 lines, 2048 bytes.
#pragma once
#include "epilogue.h"
#include "gemm.h"
#include "platform.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

constexpr u32 TILE_M = 128, TILE_K = 64;
constexpr u32 PANEL = 64;               // lines of a panel, and elements of a line
constexpr u32 PANEL_BYTES = 64 * 128;
constexpr u32 A_BYTES = TILE_M / PANEL * PANEL_BYTES;

// The place of 16-byte piece `piece` of line `line` in a panel.
DEVICE u32 swizzled(u32 line, u32 piece) { return line * 128 + ((piece ^ (line & 7)) << 4); }

// wgmma's view of an operand whose panels begin at `panels`, at the first 16 of the stage's K.
template <bool MN_MAJOR> DEVICE u64 descriptor(const char* panels) {
    return MN_MAJOR ? dev::smem_descriptor(panels, PANEL_BYTES, 1024) : dev::smem_descriptor(panels, 16, 1024);
}
// The same `bytes` further, and at step `k16` (of 16). Of the two words only the lower changes, by an addition: no address is beyond its 14 bits.
template <bool MN_MAJOR> DEVICE u64 descriptor_at(u64 first, u32 bytes, u32 k16) {
    return first >> 32 << 32 | (u32(first) + bytes / 16 + k16 * (MN_MAJOR ? 128 : 2));
}

// The roles in a block of 384 threads. A warpgroup begins at a multiple of 4 warps.
constexpr u32 THREADS = 384;
// The first warpgroup, the producer: two warps copy rows, one has TMA load weights or, where there are none, copies rows too, one schedules.
constexpr u32 ROW_WARPS = 2, LOAD_WARPS = 3, SCHEDULER_WARP = 3;
constexpr u32 PRODUCERS = 128, CONSUMERS = 256, CONSUMER_WARPS = CONSUMERS / 32;
constexpr u32 PRODUCER_BARRIER = 1, CONSUMER_BARRIER = 2;  // named barriers

// A task on its way from the scheduler to loaders and consumers; two, so that the next tile is loaded during an epilogue.
constexpr u32 ENTRIES = 2;
struct Entry {
    GemmTask task;
    u32 more;  // 0: the queue is at its end, and `task` is none
};
static_assert(sizeof(Entry) % 8 == 0 && alignof(Entry) == 8, "copied in words of 8 bytes");
// Places for the ends of tasks. A warp may hold its report of a task while another is at the next but one; to the third none gets before all have ended the one between.
constexpr u32 REPORTS = 4;

// A tile of 128 x N, and a block's shared memory for it: stages, then each consumer warp's unit of the epilogue, then `Control`.
// 64 x 192 would be 96 + 96 columns of gate and up, and a box has 64: so of the three widths that wgmma and the registers allow there are two.
// `COUNT` blocks, 1 or 2, work side by side: gemm_hopper_cta_pair.h.
template <u32 COLUMNS, u32 COUNT = 1> struct Tile {
    static_assert(COLUMNS == 128 || COLUMNS == 256, "whole boxes of gate and of up");
    static_assert(COUNT == 1 || COUNT == 2, "a block or a cluster of two");
    static constexpr bool CTA_PAIR = COUNT == 2;
    static constexpr u32 N = COLUMNS, STAGES = N == 256 ? 4 : 6;
    static constexpr u32 STORING_WARPS = COUNT * CONSUMER_WARPS;  // of a task
    static constexpr u32 B_PANELS = N / PANEL, B_BYTES = B_PANELS * PANEL_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
    static_assert(A_BYTES == TILE_M * TILE_K * 2 && B_BYTES == N * TILE_K * 2, "panels cover the tile");

    struct Control {
        u64 full[STAGES];    // a stage holds its operands: an arrival of each thread of a loading warp, and TMA's bytes
        u64 empty[STAGES];   // its operands are no longer read: an arrival of each consumer warp, of both blocks of a pair
        u64 filled[ENTRIES];  // an entry is filled: an arrival of the scheduler
        u64 done[ENTRIES];   // nobody reads it any more: an arrival of each loading and each consumer warp; in a pair's first block of the second's consumers too
        u64 offered[ENTRIES];  // in the second block of a pair: the first one's entry is filled, an arrival of its scheduler
        Entry entry[ENTRIES];
        DoneCounters done_counters[REPORTS];   // where the end of a task is counted
        u32 finished[REPORTS];  // consumer warps that have reported their part of it, over all tasks; of a pair both blocks', in the first
        u32 deferred[CONSUMER_WARPS];  // a consumer warp's report that it still holds, its number in these and 1; 0: none
        float row_sums[TILE_M];
        u32 requested;           // the scheduler's: entries it has filled
        const void* maps;    // and the tensor maps of the last one that has any
        RowSource<Bf16> rows[LOAD_WARPS];  // each loading warp's
        u32 copied_until;    // the last loading warp's, in a pair: stages before this one lie where threads of the other block may have copied to
    };

    static constexpr u32 UNITS_AT = STAGES * STAGE_BYTES;
    static constexpr u32 CONTROL_AT = UNITS_AT + CONSUMER_WARPS * UNIT_BYTES;
    static constexpr u32 SHARED_BYTES = CONTROL_AT + sizeof(Control);
    static_assert(SHARED_BYTES <= 226 * 1024, "leaves the kernel 1 KB of a block's 227");
};

// For the n-th use of COUNT slots taken round robin: the slot's number, and the parity of completion n / COUNT of its barrier.
template <u32 COUNT> DEVICE u32 nth(u32 n) { return n % COUNT; }
template <u32 COUNT> DEVICE u32 parity(u32 n) { return n / COUNT & 1; }

}  // namespace hopper
}  // namespace aristos
#endif
