// Epilogues: all of them on Ampere; on Hopper those that gemm_hopper_store.h does not cover.
//
// A warp processes its accumulators in units of 16 rows by 64 columns. The layout of a unit is the same for mma.m16n8k16 and for a warp's
// share of wgmma. A unit consists of eight blocks of 8 columns. In each block, lane l holds columns 2 (l % 4) and 2 (l % 4) + 1, first of
// row l / 4, then of row l / 4 + 8. `stage_unit` writes a unit to the warp's own 4 KiB of shared memory. `finish_unit` reads it with 8
// consecutive columns of a row per lane (4 for f32 gradients), so that all global loads and stores have 16 bytes per lane and 8 (or 16)
// lanes cover a row of the unit. Only warp barriers are needed.
#pragma once
#include "activation.h"
#include "gemm.h"

namespace aristos {

constexpr u32 UNIT_ROWS = 16, UNIT_COLS = 64;
constexpr u32 UNIT_BYTES = UNIT_ROWS * UNIT_COLS * 4;
constexpr u32 UNIT_PIECES = UNIT_COLS / 8;  // of 8 columns, per row

struct alignas(8) FloatPair { float lo, hi; };
struct alignas(16) FloatQuad { float v[4]; };

// Whether units are also loaded by halves of their rows (the columns of gate and of up), which FORWARD_UP needs.
template <u32 KINDS> constexpr bool by_halves() { return (KINDS & kind_set(FORWARD_UP)) != 0; }

// Offset of 16-byte quad `q` (of 16) of a unit's row, swizzled against bank conflicts. The hardware executes the 8-byte stores of
// `stage_unit` for 16 lanes at a time: 4 rows of 2 quads. The hardware executes 16-byte loads for 8 lanes at a time: 8 even or 8 odd quads
// of one row, 8 consecutive quads of one row, or, by halves, 4 quads of each of two rows. Only the last case needs `row & 1`; without
// HALVES this term is left out to save registers. gemm_test checks for conflicts.
template <bool HALVES> DEVICE constexpr u32 unit_offset(u32 row, u32 q) {
    return row * (UNIT_COLS * 4) + ((q ^ (row & 3) << 1 ^ (HALVES ? row & 1 : 0) ^ q >> 3) << 4);
}

// Offset of the first two of a lane's four accumulators of the n-th 8 columns, in `row` and `column` of the unit; the other two are 8
// rows below.
template <bool HALVES> DEVICE constexpr u32 stored_at(u32 row, u32 column, u32 n) {
    return unit_offset<HALVES>(row, n * 2 + column / 4) + column % 4 * 4;
}

// `get(n, i)`: this lane's accumulator i (of 4) of the n-th 8 columns (of 8). A sync_warp must follow.
template <bool HALVES, class Get> DEVICE void stage_unit(char* unit, Get get) {
    u32 row = dev::lane() / 4, column = dev::lane() % 4 * 2;
    UNROLL for (u32 n = 0; n < 8; n++) {
        *reinterpret_cast<FloatPair*>(unit + stored_at<HALVES>(row, column, n)) = {get(n, 0), get(n, 1)};
        *reinterpret_cast<FloatPair*>(unit + stored_at<HALVES>(row + 8, column, n)) = {get(n, 2), get(n, 3)};
    }
}

template <bool HALVES> DEVICE void load_piece(const char* unit, u32 row, u32 piece, float (&v)[8]) {
    UNROLL for (u32 half = 0; half < 2; half++) {
        FloatQuad quad = *reinterpret_cast<const FloatQuad*>(unit + unit_offset<HALVES>(row, piece * 2 + half));
        UNROLL for (u32 i = 0; i < 4; i++) v[half * 4 + i] = quad.v[i];
    }
}

DEVICE FloatQuad load_quad(const float* p) {
    Vec16 bits = dev::load16(p);
    FloatQuad quad;
    __builtin_memcpy(&quad, &bits, 16);
    return quad;
}
// For data that is not read again soon.
DEVICE void store_quad_stream(float* p, FloatQuad quad) {
    Vec16 bits;
    __builtin_memcpy(&bits, &quad, 16);
    dev::store16_stream(p, bits);
}

template <class T> DEVICE Vec16 pack8(const float (&v)[8]) {
    Vec16 out;
    UNROLL for (u32 i = 0; i < 4; i++) out.w[i] = dev::pack<T>(v[2 * i], v[2 * i + 1]);
    return out;
}

template <class T> DEVICE void unpack8(Vec16 in, float (&v)[8]) {
    UNROLL for (u32 i = 0; i < 4; i++) dev::unpack<T>(in.w[i], v[2 * i], v[2 * i + 1]);
}

// Adds bias[column .. column + 8) if `bias` is not null.
DEVICE void add_bias(const float* bias, u32 column, float (&v)[8]) {
    if (!bias) return;
    UNROLL for (u32 half = 0; half < 2; half++) {
        FloatQuad quad = load_quad(bias + column + half * 4);
        UNROLL for (u32 i = 0; i < 4; i++) v[half * 4 + i] += quad.v[i];
    }
}

// `row0`, `column0`: the unit's first row and column in the output (in h for a gated FORWARD_UP).
template <class T, class Act> DEVICE void finish_forward_up(const GemmTask& t, const char* unit, u32 row0, u32 column0) {
    u32 pieces = t.gated ? UNIT_PIECES / 2 : UNIT_PIECES;
    for (u32 item = dev::lane(); item < UNIT_ROWS * pieces; item += 32) {
        u32 r = item / pieces, piece = item % pieces;
        u32 row = row0 + r, column = column0 + piece * 8;
        if (row >= t.rows || column >= t.intermediate) continue;
        float up[8], h[8];
        T* gate_up = static_cast<T*>(t.gate_up) + u64(row) * gate_up_width(t) + column;
        if (t.gated) {
            float gate[8];
            load_piece<true>(unit, r, piece, gate);
            load_piece<true>(unit, r, piece + UNIT_PIECES / 2, up);
            add_bias(t.gate_bias, column, gate);
            add_bias(t.up_bias, column, up);
            if (t.training) {
                dev::store16(gate_up, pack8<T>(gate));
                dev::store16(gate_up + t.intermediate, pack8<T>(up));
            }
            UNROLL for (u32 i = 0; i < 8; i++) h[i] = Act::at(gate[i]).value * up[i];
        } else {
            load_piece<true>(unit, r, piece, up);
            add_bias(t.up_bias, column, up);
            if (t.training) dev::store16(gate_up, pack8<T>(up));
            UNROLL for (u32 i = 0; i < 8; i++) h[i] = Act::at(up[i]).value;
        }
        dev::store16(static_cast<T*>(t.h) + u64(row) * t.intermediate + column, pack8<T>(h));
    }
}

// The unit holds q = dY down. With g the activation's argument: h = act(g) up, d_up = w q act(g), d_gate = w q up act'(g); not gated: h =
// act(g), d_g = w q act'(g). `row_sums[r]` becomes the sum of q h over the unit's columns, for its 16 rows.
template <bool HALVES, class T, class Act>
DEVICE void finish_backward_down(const GemmTask& t, const char* unit, u32 row0, u32 column0, float* row_sums) {
    constexpr u32 ITEMS = UNIT_ROWS * UNIT_PIECES / 32, ROW_STEP = 32 / UNIT_PIECES;
    u32 piece = dev::lane() % UNIT_PIECES, first = dev::lane() / UNIT_PIECES;
    u32 column = column0 + piece * 8, I = t.intermediate;
    // All loads are issued before the first use, because they are the epilogue's only accesses with memory latency.
    Vec16 saved_g[ITEMS], saved_up[ITEMS];
    float weights[ITEMS], sums[ITEMS];
    UNROLL for (u32 j = 0; j < ITEMS; j++) {
        u32 row = row0 + first + j * ROW_STEP;
        saved_g[j] = saved_up[j] = {{0, 0, 0, 0}};
        weights[j] = 1.0f;
        if (row < t.rows && column < I) {
            const T* gate_up = static_cast<const T*>(t.gate_up) + u64(row) * gate_up_width(t) + column;
            saved_g[j] = dev::load16(gate_up);
            if (t.gated) saved_up[j] = dev::load16(gate_up + I);
            if (t.weight) weights[j] = t.weight[row];
        }
    }
    UNROLL for (u32 j = 0; j < ITEMS; j++) {
        u32 r = first + j * ROW_STEP, row = row0 + r;
        bool valid = row < t.rows && column < I;
        float q[8], g[8], up[8];
        load_piece<HALVES>(unit, r, piece, q);
        unpack8<T>(saved_g[j], g);
        unpack8<T>(saved_up[j], up);  // zeros where not gated
        sums[j] = 0.0f;
        UNROLL for (u32 i = 0; i < 8; i++) {
            ValueSlope act = Act::at(g[i]);
            float dh = weights[j] * q[i], h = act.value;
            g[i] = dh * act.slope;
            if (t.gated) {
                g[i] *= up[i];
                h *= up[i];
                up[i] = dh * act.value;
            }
            sums[j] += q[i] * h;  // 0 outside the output, where q is 0
            q[i] = weights[j] * h;
        }
        if (valid) {
            T* gate_up = static_cast<T*>(t.gate_up) + u64(row) * gate_up_width(t) + column;
            dev::store16(gate_up, pack8<T>(g));
            if (t.gated) dev::store16(gate_up + I, pack8<T>(up));
            dev::store16(static_cast<T*>(t.h) + u64(row) * I + column, pack8<T>(q));
        }
    }
    UNROLL for (u32 mask = 1; mask < UNIT_PIECES; mask *= 2)
        UNROLL for (u32 j = 0; j < ITEMS; j++) sums[j] += dev::shfl_xor(sums[j], mask);
    if (piece == 0) UNROLL for (u32 j = 0; j < ITEMS; j++) row_sums[first + j * ROW_STEP] = sums[j];
}

// y = accumulators (+ bias), rounded to T.
template <bool HALVES, class T>
DEVICE void finish_rows(const GemmTask& t, const char* unit, u32 row0, u32 column0, const float* bias) {
    for (u32 item = dev::lane(); item < UNIT_ROWS * UNIT_PIECES; item += 32) {
        u32 r = item / UNIT_PIECES, piece = item % UNIT_PIECES;
        u32 row = row0 + r, column = column0 + piece * 8;
        if (row >= t.rows || column >= t.hidden) continue;
        float v[8];
        load_piece<HALVES>(unit, r, piece, v);
        add_bias(bias, column, v);
        dev::store16(static_cast<T*>(t.y) + u64(row) * t.hidden + column, pack8<T>(v));
    }
}

// out (+)= accumulators, f32.
template <bool HALVES> DEVICE void finish_gradient(const GemmTask& t, const char* unit, u32 row0, u32 column0) {
    constexpr u32 QUADS = UNIT_COLS / 4, ITEMS = UNIT_ROWS * QUADS / 32, ROW_STEP = 32 / QUADS;
    u32 quad = dev::lane() % QUADS, first = dev::lane() / QUADS;
    u32 m = gemm_m(t), n = gemm_n(t), column = column0 + quad * 4;
    if (column >= n) return;
    FloatQuad sums[ITEMS];  // loaded before any store, since loads cannot be moved across stores
    UNROLL for (u32 j = 0; j < ITEMS; j++) {
        u32 row = row0 + first + j * ROW_STEP;
        sums[j] = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (t.accumulate && row < m) sums[j] = load_quad(t.out + u64(row) * n + column);
    }
    UNROLL for (u32 j = 0; j < ITEMS; j++) {
        u32 r = first + j * ROW_STEP, row = row0 + r;
        FloatQuad v = *reinterpret_cast<const FloatQuad*>(unit + unit_offset<HALVES>(r, quad));
        UNROLL for (u32 i = 0; i < 4; i++) sums[j].v[i] += v.v[i];
        if (row < m) store_quad_stream(t.out + u64(row) * n + column, sums[j]);
    }
}

// All lanes of a warp. Finishes the unit whose first accumulator is (`row`, `column`) of the tile, after `stage_unit` and sync_warp.
// Another sync_warp must precede the next write to the unit. `row_sums`: f32 [tile_n / 64][tile_m] in shared memory, written only by
// BACKWARD_DOWN, for `finish_d_weight`.
template <class T, u32 KINDS>
DEVICE void finish_unit(const GemmTask& t, const char* unit, u32 row, u32 column, u32 tile_m, float* row_sums) {
    constexpr bool HALVES = by_halves<KINDS>();
    u32 row0 = t.m0 + row, column0 = t.n0 + (is_paired(t) ? column / 2 : column);
    float* sums = row_sums + column / UNIT_COLS * tile_m + row;
    auto is = [&](GemmKind kind) { return (KINDS & kind_set(kind)) != 0 && t.kind == kind; };
    if (is(FORWARD_UP)) {
        switch (t.activation) {
            case ACT_SILU: return finish_forward_up<T, Silu>(t, unit, row0, column0);
            case ACT_GELU: return finish_forward_up<T, Gelu>(t, unit, row0, column0);
            case ACT_GELU_TANH: return finish_forward_up<T, GeluTanh>(t, unit, row0, column0);
            default: return finish_forward_up<T, Relu>(t, unit, row0, column0);
        }
    }
    if (is(BACKWARD_DOWN)) {
        switch (t.activation) {
            case ACT_SILU: return finish_backward_down<HALVES, T, Silu>(t, unit, row0, column0, sums);
            case ACT_GELU: return finish_backward_down<HALVES, T, Gelu>(t, unit, row0, column0, sums);
            case ACT_GELU_TANH: return finish_backward_down<HALVES, T, GeluTanh>(t, unit, row0, column0, sums);
            default: return finish_backward_down<HALVES, T, Relu>(t, unit, row0, column0, sums);
        }
    }
    if (is(FORWARD_DOWN) || is(BACKWARD_UP)) {
        return finish_rows<HALVES, T>(t, unit, row0, column0, is(FORWARD_DOWN) ? t.down_bias : nullptr);
    }
    if (KINDS & A_MN_MAJOR_KINDS) finish_gradient<HALVES>(t, unit, row0, column0);
}

// Number of 128-byte lines of global memory that `finish_unit` will read for the tile's rows. All of these lines are prefetched into L2
// late in the main loop or after it, so that not every unit waits for DRAM.
template <u32 TILE_M, u32 TILE_N> DEVICE u32 finish_lines(const GemmTask& t) {
    return t.kind == BACKWARD_DOWN ? TILE_M * TILE_N / 64 : a_mn_major(t.kind) && t.accumulate ? TILE_M * TILE_N / 32 : 0;
}

// Prefetches line `i`. For BACKWARD_DOWN with a gate, the lines of gate and of up count as one and are prefetched together.
template <class T, u32 TILE_M, u32 TILE_N> DEVICE void prefetch_finish_line(const GemmTask& t, u32 i) {
    u32 width = t.kind == BACKWARD_DOWN ? 64 : 32;  // elements per line
    u32 row = t.m0 + i / (TILE_N / width), column = t.n0 + i % (TILE_N / width) * width;
    if (row >= gemm_m(t) || column >= gemm_n(t)) return;
    if (t.kind == BACKWARD_DOWN) {
        const T* gate_up = static_cast<const T*>(t.gate_up) + u64(row) * gate_up_width(t) + column;
        dev::prefetch_l2(gate_up);
        if (t.gated) dev::prefetch_l2(gate_up + t.intermediate);
    } else {
        dev::prefetch_l2(t.out + u64(row) * gemm_n(t) + column);
    }
}

// Prefetches all lines with THREADS threads, numbered `thread`.
template <class T, u32 TILE_M, u32 TILE_N, u32 THREADS> DEVICE void prefetch_finish(const GemmTask& t, u32 thread) {
    for (u32 i = thread, lines = finish_lines<TILE_M, TILE_N>(t); i < lines; i += THREADS) prefetch_finish_line<T, TILE_M, TILE_N>(t, i);
}

// BACKWARD_DOWN: stores the tile's part of the gradient of each row's slot weight: the sum of `row_sums` over the tile's units, in column
// order. Called by at least `tile_m` threads, numbered `thread`, after a barrier among the warps that called `finish_unit`.
DEVICE void finish_d_weight(const GemmTask& t, const float* row_sums, u32 tile_m, u32 tile_n, u32 thread) {
    if (t.kind != BACKWARD_DOWN || !t.d_weight || thread >= tile_m || t.m0 + thread >= t.rows) return;
    float sum = 0.0f;
    for (u32 i = 0; i < tile_n / UNIT_COLS; i++) sum += row_sums[i * tile_m + thread];
    t.d_weight[u64(t.m0 + thread) * t.d_weight_stride + t.n0 / tile_n] = sum;
}

}  // namespace aristos
