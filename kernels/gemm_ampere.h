// A GEMM tile with mma.sync, for sm_80 and later. One block computes M x N accumulators, in chunks of 64 steps of K.
//
// Choice of tiles. For 16 steps of K of a 128 x 256 tile (524288 products), eight warps of 64 x 64 read 32 KiB of fragments from shared
// memory, and the copies write 12 KiB. An A100 SM multiplies 1024 pairs and moves 128 bytes per clock, so shared memory is busy for 69% of
// the tensor cores' time. With 128 x 128 (eight warps of 64 x 32) it would be 100%, and L2 would have to deliver 32 instead of 24 bytes per
// clock and SM. 128 accumulators and two sets of fragments (64 registers) fit into 255 registers per thread, and three stages of 48 KiB
// into 163 KiB. A copy has the time of two chunks, about 4000 clocks, to arrive. 64 x 128 is for problems with too few larger tiles for all
// SMs: its four warps of 32 x 64 keep shared memory busy for 113% of the tensor cores' time and need 48 bytes of L2 per clock, but two
// blocks fit on an SM, so that one multiplies during the other's epilogue.
//
// Layout: in a stage a K-major operand (gemm.h) has 128-byte rows, one per row or column of the tile; an MN-major one has 64 rows, one per
// step of K. 16-byte piece p of row r is stored at p ^ (r % 8), so that copies and ldmatrix (8 rows, same p) are free of bank conflicts.
// The two layouts differ in ldmatrix (plain or transposed) and in their row pointers. A K-major operand has a table that is filled once, an
// MN-major one a ring that is filled one chunk ahead of the copies.
//
// Rows and columns past the end of a K-major operand are not copied: the stale values there affect only accumulators that are never
// stored. A warp without any valid row, as in half of a 128-row tile with 64 rows, neither reads nor multiplies.
#pragma once
#include "epilogue.h"

namespace aristos {

template <u32 TILE_M, u32 TILE_N> struct AmpereTile {
    static constexpr u32 M = TILE_M, N = TILE_N, K = 64, THREADS = N, STAGES = 3;
    // Two warps down, the rest across, each 64 columns wide.
    static constexpr u32 WARPS = THREADS / 32, ACROSS = N / UNIT_COLS, WARP_M = M / 2, WARP_UNITS = WARP_M / UNIT_ROWS;
    static constexpr u32 A_BYTES = M * K * 2, B_BYTES = N * K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
    static constexpr u32 RING = STAGES + 1;  // chunks whose row pointers are kept: those being read, and the next one
    static constexpr u32 TABLE_BYTES = 8 * (N > RING * K ? N : RING * K);  // row pointers of one operand: N, M or RING * K
    static constexpr u32 TABLES = STAGES * STAGE_BYTES;
    static constexpr u32 SOURCES = TABLES + 2 * TABLE_BYTES, CLAIMED = SOURCES + 112, SHARED_BYTES = SOURCES + 128;
    // After the main loop the stages' memory holds the tile's units, by row, and the sums of finish_unit.
    static constexpr u32 UNITS = M / UNIT_ROWS * ACROSS, ROW_SUMS = UNITS * UNIT_BYTES;
    static_assert(WARPS == 2 * ACROSS && M <= THREADS && WARP_M % UNIT_ROWS == 0, "warps");
    static_assert(2 * sizeof(RowSource<Bf16>) <= CLAIMED - SOURCES && ROW_SUMS + N / UNIT_COLS * M * 4 <= TABLES, "shared memory");
};

// One operand in shared memory: EXTENT rows (A) or columns (B) of the tile, by K.
template <class T, class Tile, u32 EXTENT, bool MN_MAJOR> struct AmpereOperand {
    static constexpr u32 ROW_BYTES = MN_MAJOR ? EXTENT * 2 : Tile::K * 2, PIECES = ROW_BYTES / 16, PASS_BYTES = 16 * Tile::THREADS;
    static constexpr u32 PASS_ROWS = Tile::THREADS / PIECES, PASSES = EXTENT * Tile::K * 2 / PASS_BYTES;
    static_assert(PASS_ROWS % 8 == 0, "a pass later the swizzle is the same");

    const T** table;
    u32 column;        // first element of this thread's piece in the row; MN-major: in the output
    u32 limit;         // of `column`: MN-major, the output's rows or columns; otherwise K
    u32 copy_offset;   // destination in a stage, plus PASS_BYTES per pass
    u32 copy_row;      // row of the first pass
    u32 read_offset;   // this lane's row for ldmatrix; `fragment` applies the swizzle and the step

    // `first` of `extent`: the tile's offset in the output. `warp_first`: this warp's offset in the tile.
    DEVICE AmpereOperand(char* table_memory, u32 first, u32 extent, u32 k, u32 warp_first, bool is_a) {
        u32 thread = dev::thread(), lane = dev::lane();
        u32 row = thread / PIECES, piece = thread % PIECES;
        table = reinterpret_cast<const T**>(table_memory);
        column = piece * 8 + (MN_MAJOR ? first : 0);
        limit = MN_MAJOR ? extent : k;
        copy_row = row;
        copy_offset = row * ROW_BYTES + ((piece ^ (row % 8)) << 4);
        // ldmatrix.x4: lanes 8 j .. 8 j + 7 give the rows of matrix j. Matrices of A: (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15,
        // 8-15); for B the two middle ones are swapped, as two fragments of 8 columns.
        u32 outer = is_a ? lane / 8 % 2 : lane / 16;  // 1: rows or columns 8-15
        u32 inner = is_a ? lane / 16 : lane / 8 % 2;  // 1: k 8-15
        u32 read_row = MN_MAJOR ? lane % 8 + inner * 8 : warp_first + lane % 8 + outer * 8;
        u32 read_piece = MN_MAJOR ? warp_first / 8 + outer : inner;
        read_offset = read_row * ROW_BYTES + ((read_piece ^ (lane % 8)) << 4);
    }

    // Issues copy passes [FROM, TO) of the chunk that begins at `k0` into `stage`. `entry`: the table's first entry for it.
    template <u32 FROM, u32 TO> DEVICE void copy(char* stage, u32 k0, u32 entry) const {
        u32 at = MN_MAJOR ? column : k0 + column;
        entry += copy_row;
        UNROLL for (u32 pass = FROM; pass < TO; pass++) {
            const T* row = table[entry + pass * PASS_ROWS];
            // Steps past the end of K must be zero.
            if (MN_MAJOR || row != nullptr) dev::cp_async16(stage + copy_offset + pass * PASS_BYTES, row + at, row != nullptr && at < limit);
        }
    }

    // Fragment `i` (16 rows of A or columns of B) of step `kk` (16 of k) of a stage.
    DEVICE void fragment(const char* stage, u32 i, u32 kk, u32 (&r)[4]) const {
        if (MN_MAJOR) dev::ldmatrix_x4_trans(r, stage + (read_offset ^ (i << 5)) + kk * (16 * ROW_BYTES));
        else dev::ldmatrix_x4(r, stage + (read_offset ^ (kk << 5)) + i * (16 * ROW_BYTES));
    }
};

// acc = A B^T for the tile. Returns with no copy in flight and all warps past their last read of shared memory. False if this warp has no
// rows and so no result.
template <class T, class Tile, bool A_MN_MAJOR, bool B_MN_MAJOR>
DEVICE bool ampere_multiply(const GemmTask& t, char* shared, float (&acc)[Tile::WARP_UNITS][8][4]) {
    constexpr u32 STEPS = Tile::K / 16, ROWS = Tile::WARP_UNITS;
    static_assert(STEPS == 4 && Tile::STAGES >= 3, "the schedule below");
    const u32 thread = dev::thread(), k_end = gemm_k(t), chunks = (k_end + Tile::K - 1) / Tile::K;
    const u32 warp_row = dev::warp() / Tile::ACROSS * Tile::WARP_M, warp_column = dev::warp() % Tile::ACROSS * UNIT_COLS;
    AmpereOperand<T, Tile, Tile::M, A_MN_MAJOR> a(shared + Tile::TABLES, t.m0, gemm_m(t), k_end, warp_row, true);
    AmpereOperand<T, Tile, Tile::N, B_MN_MAJOR> b(shared + Tile::TABLES + Tile::TABLE_BYTES, t.n0, gemm_n(t), k_end, warp_column, false);
    static_assert(a.PASSES == 4 && b.PASSES == 8, "the schedule below");

    // Row pointers of MN-major operands: 64 threads hold A's, 64 others B's.
    const bool keeps_a = A_MN_MAJOR && thread < Tile::K, keeps_b = B_MN_MAJOR && thread / Tile::K == 1;
    // The row sources stay in shared memory, because this loop has no registers to spare.
    auto* sources = reinterpret_cast<RowSource<T>*>(shared + Tile::SOURCES);
    if (thread == 0) sources[0] = a_rows<T>(t);
    if (B_MN_MAJOR && thread == Tile::K) sources[1] = b_mn_major_rows<T>(t);
    dev::sync_block();
    auto row_of_chunk = [&](u32 chunk) { return sources[keeps_b].row(chunk * Tile::K + thread % Tile::K); };
    auto keep_row = [&](u32 chunk, const T* row) {
        const T** table = keeps_b ? b.table : a.table;
        if (keeps_a || keeps_b) table[chunk % Tile::RING * Tile::K + thread % Tile::K] = row;
    };
    if (!A_MN_MAJOR && thread < Tile::M) a.table[thread] = sources[0].row(t.m0 + thread);
    if (!B_MN_MAJOR) b.table[thread] = b_column<T>(t, thread);
    const T* next_row = nullptr;
    if (A_MN_MAJOR || B_MN_MAJOR) {
        for (u32 chunk = 0; chunk < Tile::STAGES; chunk++) keep_row(chunk, row_of_chunk(chunk));
        next_row = row_of_chunk(Tile::STAGES);
    }
    dev::sync_block();

    // Each part is a third of a chunk's copies; the last commits the group.
    auto copy = [&](u32 part, u32 chunk, char* stage) {
        const u32 a_entry = A_MN_MAJOR ? chunk % Tile::RING * Tile::K : 0, b_entry = B_MN_MAJOR ? chunk % Tile::RING * Tile::K : 0;
        if (chunk < chunks) {
            if (part == 0) a.template copy<0, 4>(stage, chunk * Tile::K, a_entry);
            if (part == 1) b.template copy<0, 4>(stage + Tile::A_BYTES, chunk * Tile::K, b_entry);
            if (part == 2) b.template copy<4, 8>(stage + Tile::A_BYTES, chunk * Tile::K, b_entry);
        }
        if (part == 2) dev::cp_async_commit();
    };
    auto keep_next = [&](u32 chunk) {
        if (!A_MN_MAJOR && !B_MN_MAJOR) return;
        keep_row(chunk + 1, next_row);
        next_row = row_of_chunk(chunk + 2);
    };
    UNROLL for (u32 chunk = 0; chunk < Tile::STAGES - 1; chunk++)
        UNROLL for (u32 part = 0; part < 3; part++) copy(part, chunk, shared + chunk * Tile::STAGE_BYTES);
    dev::cp_async_wait<Tile::STAGES - 2>();
    dev::sync_block();

    u32 read_stage = 0, write_stage = Tile::STAGES - 1;
    auto next_stage = [&] {
        read_stage = read_stage + 1 == Tile::STAGES ? 0 : read_stage + 1;
        write_stage = write_stage + 1 == Tile::STAGES ? 0 : write_stage + 1;
        dev::cp_async_wait<Tile::STAGES - 2>();
        dev::sync_block();
    };
    const bool empty = t.m0 + warp_row >= gemm_m(t);
    if (empty) {
        for (u32 chunk = 0; chunk < chunks; chunk++) {
            const u32 ahead = chunk + Tile::STAGES - 1;
            UNROLL for (u32 part = 0; part < 3; part++) copy(part, ahead, shared + write_stage * Tile::STAGE_BYTES);
            keep_next(ahead);
            if (chunk + 1 < chunks) next_stage();
        }
    } else {
        UNROLL for (u32 i = 0; i < ROWS; i++)
            UNROLL for (u32 j = 0; j < 8; j++)
                UNROLL for (u32 e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
        u32 a_frag[2][ROWS][4], b_frag[2][4][4];
        auto read = [&](const char* stage, u32 kk, u32 (&af)[ROWS][4], u32 (&bf)[4][4]) {
            UNROLL for (u32 i = 0; i < ROWS; i++) a.fragment(stage, i, kk, af[i]);
            UNROLL for (u32 j = 0; j < 4; j++) b.fragment(stage + Tile::A_BYTES, j, kk, bf[j]);
        };
        read(shared, 0, a_frag[0], b_frag[0]);
        for (u32 chunk = 0; chunk < chunks; chunk++) {
            const u32 ahead = chunk + Tile::STAGES - 1;  // replaces chunk - 1, which all warps read before the last barrier
            char* from = shared + read_stage * Tile::STAGE_BYTES;
            char* to = shared + write_stage * Tile::STAGE_BYTES;
            UNROLL for (u32 kk = 0; kk < STEPS; kk++) {
                if (kk < STEPS - 1) {
                    read(from, kk + 1, a_frag[(kk + 1) % 2], b_frag[(kk + 1) % 2]);
                    copy(kk, ahead, to);
                    if (kk == 2) keep_next(ahead);
                } else if (chunk + 1 < chunks) {
                    next_stage();
                    read(shared + read_stage * Tile::STAGE_BYTES, 0, a_frag[0], b_frag[0]);
                }
                UNROLL for (u32 i = 0; i < ROWS; i++)
                    UNROLL for (u32 j = 0; j < 8; j++) {
                        const u32 (&pair)[4] = b_frag[kk % 2][j / 2];
                        const u32 columns[2] = {pair[j % 2 * 2], pair[j % 2 * 2 + 1]};
                        dev::mma<T>(acc[i][j], a_frag[kk % 2][i], columns);
                    }
            }
        }
    }
    dev::cp_async_wait<0>();
    dev::sync_block();
    return !empty;
}

// One tile. Called by all threads of a block with SHARED_BYTES of shared memory, which must not contain `t`. On return all threads have
// stored their part of the tile and passed a barrier. Thread 0 calls `meanwhile` after the main loop, which has no registers to spare, and
// before its part of the epilogue. Meanwhile the other warps work on the epilogue.
template <class T, class Tile, u32 KINDS = ALL_KINDS, class Meanwhile>
DEVICE void gemm_task_ampere(const GemmTask& t, char* shared, Meanwhile meanwhile) {
    u32* claimed = reinterpret_cast<u32*>(shared + Tile::CLAIMED);
    {
        float acc[Tile::WARP_UNITS][8][4];
        bool any;
        if (a_mn_major<KINDS>(t.kind)) any = ampere_multiply<T, Tile, true, true>(t, shared, acc);
        else if (b_mn_major<KINDS>(t.kind)) any = ampere_multiply<T, Tile, false, true>(t, shared, acc);
        else any = ampere_multiply<T, Tile, false, false>(t, shared, acc);
        if (any) {
            const u32 first = dev::warp() / Tile::ACROSS * Tile::WARP_UNITS * Tile::ACROSS + dev::warp() % Tile::ACROSS;
            UNROLL for (u32 i = 0; i < Tile::WARP_UNITS; i++)
                stage_unit<by_halves<KINDS>()>(shared + (first + i * Tile::ACROSS) * UNIT_BYTES, [&](u32 n, u32 e) { return acc[i][n][e]; });
        }
    }
    // The prefetch is not earlier, because only now are the accumulators' registers free. The first unit still waits for DRAM; the others
    // do not.
    if (KINDS != FORWARD_KINDS) prefetch_finish<T, Tile::M, Tile::N, Tile::THREADS>(t, dev::thread());
    if (dev::thread() == 0) *claimed = 0;
    dev::sync_block();
    if (dev::thread() == 0) meanwhile();
    dev::sync_warp();
    auto* row_sums = reinterpret_cast<float*>(shared + Tile::ROW_SUMS);
    for (;;) {
        u32 unit = 0;
        if (dev::lane() == 0) unit = dev::shared_add(claimed, 1u);
        unit = dev::shfl(unit, 0);
        const u32 row = unit / Tile::ACROSS * UNIT_ROWS;
        if (unit >= Tile::UNITS || t.m0 + row >= gemm_m(t)) break;
        finish_unit<T, KINDS>(t, shared + unit * UNIT_BYTES, row, unit % Tile::ACROSS * UNIT_COLS, Tile::M, row_sums);
    }
    // read before the barrier: afterwards another thread may overwrite `t`
    const bool sums_rows = (KINDS & kind_set(BACKWARD_DOWN)) != 0 && t.kind == BACKWARD_DOWN;
    dev::sync_block();
    if (sums_rows) {
        finish_d_weight(t, row_sums, Tile::M, Tile::N, dev::thread());
        dev::sync_block();
    }
}

}  // namespace aristos
