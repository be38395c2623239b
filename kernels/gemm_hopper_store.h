// Output of 16-bit results from the Hopper GEMM: rounded in registers, written to shared memory by stmatrix, and stored by TMA.
//
// A consumer warp stores its 16 rows in *pieces* of 64 columns, one TMA box of 2 KB, in the 128-byte swizzle, which avoids bank conflicts
// for stmatrix and TMA. The warp's epilogue unit (epilogue.h) has buffers for two pieces: while TMA reads one, the warp fills the other.
// If some of the 16 rows belong to the next batch, or there are no maps of the results, lanes store 16 bytes each instead. TMA skips
// columns beyond the map.
//
// Memory ordering (PTX ISA, "Async proxy" and "Memory consistency model", "Proxies"):
// - stmatrix writes through the generic proxy, TMA reads through the async proxy: each lane issues fence_proxy_async, then a warp barrier
//   follows, and then one lane issues the store.
// - A buffer is rewritten once TMA has read it: bulk_wait_read by the issuing lane, then a warp barrier.
// - Before a tile is reported, the issuing lane waits until the stores are complete (bulk_wait, not bulk_wait_read; gemm_hopper.h). An
//   implicit proxy fence follows the completion of a bulk copy, so from then on these are ordinary writes of that lane, and its releases,
//   at any scope, cover them. Readers that acquire them need no proxy fence, since all read results through the generic proxy.
// - Other threads may have read the overwritten data in an earlier step through the generic proxy. The readers have released those reads,
//   the scheduler has acquired them, and fence_proxy_async_global orders them before the store.
#pragma once
#include "gemm_hopper_stage.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

constexpr u32 PIECE_COLS = 64, PIECE_BYTES = UNIT_ROWS * PIECE_COLS * 2, PIECES = UNIT_BYTES / PIECE_BYTES;
static_assert(PIECES == 2 && PIECE_COLS * 2 == 128 && UNIT_ROWS == RESULT_BOX_ROWS, "two buffers of 128-byte lines, one TMA box each");
constexpr u32 BLOCK_COLS = 32;  // columns taken from the accumulators at a time: half a piece

// Kinds with 16-bit results that need no memory operand except biases. BACKWARD_DOWN reads what it overwrites, 16 bytes per lane, through
// epilogue.h's units.
constexpr u32 STORED_KINDS = kind_set(FORWARD_UP) | kind_set(FORWARD_DOWN) | kind_set(BACKWARD_UP);

// Columns 32 b to 32 b + 31 of this lane's accumulators: `v[4 n + i]` is accumulator i of the n-th 8 columns. One branch per b keeps the
// accumulators' indices constant.
template <u32 N, u32 B = 0> DEVICE void copy_block(const float (&acc)[N / 2], u32 b, float (&v)[BLOCK_COLS / 2]) {
    if constexpr (B + 1 < N / BLOCK_COLS) {
        if (b != B) return copy_block<N, B + 1>(acc, b, v);
    }
    UNROLL for (u32 i = 0; i < BLOCK_COLS / 2; i++) v[i] = acc[B * (BLOCK_COLS / 2) + i];
}

// Adds `bias`, if not null, to a block whose first column is `column`. `limit`: number of columns of the output, a multiple of 8.
DEVICE void add_block_bias(const float* bias, u32 column, u32 limit, float (&v)[BLOCK_COLS / 2]) {
    if (!bias) return;
    UNROLL for (u32 n = 0; n < BLOCK_COLS / 8; n++) {
        if (column + n * 8 >= limit) return;
        FloatPair pair = *reinterpret_cast<const FloatPair*>(bias + column + n * 8 + dev::lane() % 4 * 2);
        v[n * 4] += pair.lo, v[n * 4 + 1] += pair.hi, v[n * 4 + 2] += pair.lo, v[n * 4 + 3] += pair.hi;
    }
}

template <class Act> DEVICE void activate(float (&v)[BLOCK_COLS / 2]) {
    UNROLL for (u32 i = 0; i < BLOCK_COLS / 2; i++) v[i] = Act::at(v[i]).value;
}

// Writes half `half` of a piece to TMA's source buffer.
template <class T> DEVICE void stage_block(char* piece, u32 half, const float (&v)[BLOCK_COLS / 2]) {
    const u32 lane = dev::lane(), row = lane % 16;  // first 8 rows of matrices 0 and 2, last 8 of 1 and 3
    UNROLL for (u32 pair = 0; pair < BLOCK_COLS / 16; pair++) {
        u32 packed[4];
        UNROLL for (u32 i = 0; i < 4; i++) packed[i] = dev::pack<T>(v[pair * 8 + i * 2], v[pair * 8 + i * 2 + 1]);
        dev::stmatrix_x4(piece + swizzled(row, half * 4 + pair * 2 + lane / 16), packed);
    }
}

// A destination array of pieces, by slot of the batch.
struct Result {
    char* rows;     // the batch's first row
    u32 pitch;      // bytes between rows
    u32 map;        // SlotMap
};

// Stores a piece: one lane issues a TMA store of all rows, or all lanes store the valid rows. `column`: the piece's first column. `limit`:
// number of columns of the output.
template <class T>
DEVICE void store_piece(const GemmTask& t, const Result& to, const char* piece, u32 row0, u32 column, u32 limit) {
    dev::fence_proxy_async();
    dev::sync_warp();
    if (t.slot_maps && row0 + UNIT_ROWS <= t.rows) {
        if (dev::lane() == 0) dev::tma_store_2d(static_cast<const TensorMap*>(t.slot_maps) + to.map, i32(column), i32(t.first_slot + row0), piece);
    } else {
        for (u32 item = dev::lane(); item < UNIT_ROWS * PIECE_COLS / 8; item += 32) {
            u32 r = item / (PIECE_COLS / 8), c = item % (PIECE_COLS / 8);
            if (row0 + r >= t.rows || column + c * 8 >= limit) continue;
            dev::store16(to.rows + u64(row0 + r) * to.pitch + (column + c * 8) * sizeof(T), *reinterpret_cast<const Vec16*>(piece + swizzled(r, c)));
        }
    }
    // One group per piece, possibly empty, because buffers are reused by counting groups.
    if (dev::lane() == 0) dev::bulk_commit();
}

// Stores this warp's 16 rows of the tile, from row `row` on. `unit` is free again, and the results are complete, once lane 0 has called
// bulk_wait<0>.
template <class T, u32 KINDS, class Tile> DEVICE void store_tile(const float (&acc)[Tile::N / 2], const GemmTask& t, u32 row, char* unit) {
    auto is = [&](GemmKind kind) { return (KINDS & kind_set(kind)) != 0 && t.kind == kind; };
    const bool paired = is_paired(t);
    const u32 row0 = t.m0 + row, limit = gemm_n(t), columns = paired ? Tile::N / 2 : Tile::N;
    // In training FORWARD_UP stores the pre-activations, then the activation output.
    const u32 first = !is(FORWARD_UP) ? RESULT_Y : !t.training ? RESULT_H : paired ? RESULT_GATE : RESULT_UP;
    const u32 last = is(FORWARD_UP) ? RESULT_H : RESULT_Y;
    if (dev::lane() == 0) dev::fence_proxy_async_global();
    u32 begun = 0;
    for (u32 at = 0; at < columns && t.n0 + at < limit; at += PIECE_COLS) {
        const u32 column = t.n0 + at;
        // Not unrolled, so that there is one copy of the code.
        for (u32 result = first; result <= last; result++) {
            char* piece = unit + begun++ % PIECES * PIECE_BYTES;
            if (dev::lane() == 0) dev::bulk_wait_read<PIECES - 1>();
            dev::sync_warp();
            for (u32 half = 0; half < 2; half++) {
                const u32 block = at / BLOCK_COLS + half, begin = column + half * BLOCK_COLS;
                float v[BLOCK_COLS / 2];
                copy_block<Tile::N>(acc, paired && result == RESULT_UP ? block + Tile::N / 2 / BLOCK_COLS : block, v);
                if (is(FORWARD_UP)) {
                    add_block_bias(paired && result != RESULT_UP ? t.gate_bias : t.up_bias, begin, limit, v);
                    if (result == RESULT_H) {
                        switch (t.activation) {
                            case ACT_SILU: activate<Silu>(v); break;
                            case ACT_GELU: activate<Gelu>(v); break;
                            case ACT_GELU_TANH: activate<GeluTanh>(v); break;
                            default: activate<Relu>(v);
                        }
                        if (paired) {
                            float up[BLOCK_COLS / 2];
                            copy_block<Tile::N>(acc, block + Tile::N / 2 / BLOCK_COLS, up);
                            add_block_bias(t.up_bias, begin, limit, up);
                            UNROLL for (u32 i = 0; i < BLOCK_COLS / 2; i++) v[i] *= up[i];
                        }
                    }
                } else if (is(FORWARD_DOWN)) {
                    add_block_bias(t.down_bias, begin, limit, v);
                }
                stage_block<T>(piece, half, v);
            }
            const u32 size = sizeof(T), width = result == RESULT_Y ? t.hidden : result == RESULT_H ? t.intermediate : gate_up_width(t);
            char* rows = static_cast<char*>(result == RESULT_Y ? t.y : result == RESULT_H ? t.h : t.gate_up);
            if (paired && result == RESULT_UP) rows += t.intermediate * size;
            store_piece<T>(t, {rows, width * size, result}, piece, row0, column, limit);
        }
    }
}

}  // namespace hopper
}  // namespace aristos
#endif
