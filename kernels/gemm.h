// One tile of one expert's GEMMs: the interface of both GEMM paths (gemm_ampere.h, gemm_hopper.h).
//
// X: the input rows of the batch's slots. dY: the gradients of their results, without the routing weights. w: the routing weights, by slot.
//
//   FORWARD_UP     act(X gate^T + b) * (X up^T + b), or act(X up^T + b)          -> h, and the pre-activations -> gate_up
//   FORWARD_DOWN   h down^T + b                                                  -> y
//   BACKWARD_DOWN  q = dY down; d_weight = <q, h>; the activation's backward     -> gate_up (over it), w h -> h (over it)
//   BACKWARD_UP    d_gate gate + d_up up, the gradient of X                      -> y
//   GRAD_UP        d_gate^T X or d_up^T X                                        -> out
//   GRAD_DOWN      dY^T (w h)                                                    -> out
//
// Sums are f32 (tensor cores); results of type T are rounded once. There are no atomics: every output element has one writer, and the
// order of a sum depends on the shape alone, so equal inputs give equal bits.
#pragma once
#include "params.h"
#include "platform.h"

namespace aristos {

enum GemmKind : u32 {
    FORWARD_UP = 0, FORWARD_DOWN = 1, BACKWARD_DOWN = 2, BACKWARD_UP = 3, GRAD_UP = 4, GRAD_DOWN = 5, GEMM_KINDS = 6,
};

// Sets of kinds that a kernel has code for. Backward's set contains FORWARD_UP, because backward recomputes the first GEMM if the
// activations were not kept.
constexpr u32 kind_set(GemmKind kind) { return 1u << kind; }
constexpr u32 ALL_KINDS = (1u << GEMM_KINDS) - 1;
constexpr u32 FORWARD_KINDS = kind_set(FORWARD_UP) | kind_set(FORWARD_DOWN);
constexpr u32 BACKWARD_KINDS = ALL_KINDS - kind_set(FORWARD_DOWN);

// All pointers to T, f32 or weights are 16-byte aligned. Pointers by slot start at the batch's first slot. Fields that the table above
// does not name for a kind are undefined.
struct GemmTask {
    u32 kind;          // GemmKind
    u32 rows;          // slots of the batch, at least 1
    u32 m0, n0;        // first row and first column of the tile in the output; for a gated FORWARD_UP a column of h
    u32 hidden, intermediate;  // multiples of 8
    u8 gated;
    u8 activation;     // Activation
    u8 training;       // FORWARD_UP: store gate_up
    u8 accumulate;     // GRAD_*: add to `out` rather than overwrite it
    u8 which;          // GRAD_UP: 0 for gate, 1 for up; ignored when not gated
    u8 unused[3];
    u32 d_weight_stride;       // f32s from one slot's partial sums to the next one's: at least the tiles across I
    const void* const* row;    // [rows]: each slot's row of X (FORWARD_UP, GRAD_UP) or dY (BACKWARD_DOWN, GRAD_DOWN), [H]
    void* gate_up;          // [rows, 2 I]: gate's columns, then up's; not gated: [rows, I]
    void* h;           // [rows, I]
    void* y;           // [rows, H]
    const void *gate, *up, *down;        // [I, H], [I, H], [H, I]; gate only when gated
    const float *gate_bias, *up_bias;    // [I], null without
    const float* down_bias;              // [H], null without
    const float* weight;       // [rows]; null: all 1
    float* d_weight;           // [rows][d_weight_stride]: one partial sum for each tile across I; null: not needed
    float* out;                // GRAD_UP: [I, H], GRAD_DOWN: [H, I]
    const void* tensor_maps;   // of gate, up and down, from Tables::tensor_maps; null on Ampere
    const void* slot_maps;     // by SlotMap, of the arrays that hold gate_up, h and y; null: no TMA for results and their use as operands
    u32 first_slot;            // row of the batch's first slot in those arrays
    u32 expert;                // the batch's matrix in each of the tensor maps
    u32 split, jump;           // GRAD_*: slots from `split` on lie `jump` slots further
    u32 batch, tile;           // for the scheduler
};

// Counters to increment when a task's results are stored; null if unused.
struct DoneCounters { u32 *first, *second; };
// One thread. Increments the counters, which releases this thread's stores and those that it has acquired.
DEVICE void count_done(const DoneCounters& done_counters) {
    if (done_counters.first) dev::fetch_add_acq_rel(done_counters.first, 1u);
    if (done_counters.second) dev::fetch_add_acq_rel(done_counters.second, 1u);
}

// Within each 64 accumulator columns of a gated FORWARD_UP the first 32 belong to gate and the other 32 to the same columns of up, so
// that one warp has both operands of the product with the activation.
constexpr u32 GATED_GROUP = 32;

DEVICE bool is_paired(const GemmTask& t) { return t.kind == FORWARD_UP && t.gated; }
DEVICE u32 gate_up_width(const GemmTask& t) { return t.gated ? 2 * t.intermediate : t.intermediate; }

// Dimensions of the product: output rows, output columns (columns of h where two products form one column), and terms of each sum.
DEVICE u32 gemm_m(const GemmTask& t) {
    return t.kind == GRAD_UP ? t.intermediate : t.kind == GRAD_DOWN ? t.hidden : t.rows;
}
DEVICE u32 gemm_n(const GemmTask& t) {
    bool over_intermediate = t.kind == FORWARD_UP || t.kind == BACKWARD_DOWN || t.kind == GRAD_DOWN;
    return over_intermediate ? t.intermediate : t.hidden;
}
DEVICE u32 gemm_k(const GemmTask& t) {
    switch (t.kind) {
        case FORWARD_UP: case BACKWARD_DOWN: return t.hidden;
        case FORWARD_DOWN: return t.intermediate;
        case BACKWARD_UP: return gate_up_width(t);
        default: return t.rows;
    }
}

// Output columns of a tile of `tile_n` accumulators.
DEVICE u32 tile_columns(u32 kind, bool gated, u32 tile_n) { return kind == FORWARD_UP && gated ? tile_n / 2 : tile_n; }

// Operand layouts: A is [M, K] and B [N, K]. K-major: contiguous along K, so a `RowSource` row is one output row (A) or column (B).
// MN-major: contiguous along M (A) or N (B), so a row is one step of K across all output rows or columns.
DEVICE bool a_mn_major(u32 kind) { return kind == GRAD_UP || kind == GRAD_DOWN; }
DEVICE bool b_mn_major(u32 kind) { return kind != FORWARD_UP && kind != FORWARD_DOWN; }
// For a kernel with code for KINDS only: false at compile time if no kind of KINDS is MN-major.
constexpr u32 A_MN_MAJOR_KINDS = kind_set(GRAD_UP) | kind_set(GRAD_DOWN);
template <u32 KINDS> DEVICE bool a_mn_major(u32 kind) { return (KINDS & A_MN_MAJOR_KINDS) != 0 && a_mn_major(kind); }
template <u32 KINDS> DEVICE bool b_mn_major(u32 kind) { return (KINDS & ~FORWARD_KINDS) != 0 && b_mn_major(kind); }

// Rows of an operand: consecutive in memory, or given by an array of pointers. From row `split` on, rows or pointers lie `jump` bytes
// further. Addresses are integers because the two parts need not be in one array.
template <class T> struct RowSource {
    u64 base, jump;  // bytes; `jump` is added from row `split` on
    u32 stride, split, rows;
    bool pointers;

    // Returns null past the end. Has no branch except a predicated load, because the main loop calls it.
    DEVICE const T* row(u32 i) const {
        u64 at = base + u64(i) * stride + (i < split ? 0 : jump);
        if (pointers && i < rows) at = *reinterpret_cast<const u64*>(at);
        return reinterpret_cast<const T*>(i < rows ? at : 0);
    }
    DEVICE RowSource in_two_parts(const GemmTask& t) const {
        RowSource r = *this;
        r.split = t.split, r.jump = u64(t.jump) * stride;
        return r;
    }
};

template <class T> DEVICE RowSource<T> in_memory(const void* base, u32 width, u32 rows) {
    return {reinterpret_cast<u64>(base), 0, width * u32(sizeof(T)), ~0u, rows, false};
}
template <class T> DEVICE RowSource<T> gathered(const void* const* row, u32 rows) {
    return {reinterpret_cast<u64>(row), 0, u32(sizeof(void*)), ~0u, rows, true};
}

// Rows of A: one per output row, or, MN-major, per step of K.
template <class T> DEVICE RowSource<T> a_rows(const GemmTask& t) {
    switch (t.kind) {
        case FORWARD_DOWN: return in_memory<T>(t.h, t.intermediate, t.rows);
        case BACKWARD_UP: return in_memory<T>(t.gate_up, gate_up_width(t), t.rows);
        case GRAD_UP:
            return in_memory<T>(static_cast<const T*>(t.gate_up) + (t.gated && t.which ? t.intermediate : 0), gate_up_width(t), t.rows).in_two_parts(t);
        case GRAD_DOWN: return gathered<T>(t.row, t.rows).in_two_parts(t);
        default: return gathered<T>(t.row, t.rows);
    }
}

// Rows of an MN-major B: one per step of K.
template <class T> DEVICE RowSource<T> b_mn_major_rows(const GemmTask& t) {
    u32 H = t.hidden, I = t.intermediate;
    switch (t.kind) {
        case BACKWARD_DOWN: return in_memory<T>(t.down, I, H);
        case BACKWARD_UP: {
            RowSource<T> source = in_memory<T>(t.gated ? t.gate : t.up, H, gate_up_width(t));
            u64 up = reinterpret_cast<u64>(t.up) - u64(I) * source.stride;  // address of a virtual row 0 such that row I is at t.up
            if (t.gated) source.split = I, source.jump = up - source.base;
            return source;
        }
        case GRAD_UP: return gathered<T>(t.row, t.rows).in_two_parts(t);
        default: return in_memory<T>(t.h, I, t.rows).in_two_parts(t);
    }
}

// A K-major B (FORWARD_*): the weight row for accumulator column `i` of the tile. Null past the end.
template <class T> DEVICE const T* b_column(const GemmTask& t, u32 i) {
    if (t.kind == FORWARD_DOWN) return in_memory<T>(t.down, t.intermediate, t.hidden).row(t.n0 + i);
    if (!t.gated) return in_memory<T>(t.up, t.hidden, t.intermediate).row(t.n0 + i);
    u32 in_group = i % (2 * GATED_GROUP), column = t.n0 + i / (2 * GATED_GROUP) * GATED_GROUP + i % GATED_GROUP;
    return in_memory<T>(in_group < GATED_GROUP ? t.gate : t.up, t.hidden, t.intermediate).row(column);
}

}  // namespace aristos
