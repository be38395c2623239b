// The loading warps of the Hopper GEMM: they fill stages, tile after tile, as fast as the consumers free them.
//
// One thread of a dedicated warp issues the TMA loads of weights. Operands that are contiguous in slot arrays (h and gate_up) are loaded
// by TMA too, 64 slots at a time. Rows gathered through pointers, and groups of fewer than 64 slots (which other batches follow), are
// copied by cp.async, 16 bytes per lane and a whole 128-byte line per quarter warp, to the same addresses as with TMA; out-of-range
// elements are filled with zeros.
//
// No loading thread waits for a copy: each registers its copies with the stage's barrier (cp.async.mbarrier.arrive.noinc). cp.async
// writes through the generic proxy and wgmma reads through the async proxy; the consumers issue the fence between them after waiting for
// the barrier (gemm_hopper.h, `wait_stage`). This fence also orders the writes before later TMA writes of other tasks, because it
// precedes the release of the stage.
#pragma once
#include "gemm_hopper_cta_pair.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

// Whether all rows of the panel of A at output row `first` are loaded by TMA, for a task whose A is K-major.
DEVICE bool rows_by_tma(const GemmTask& t, u32 first) {
    return (t.kind == FORWARD_DOWN || t.kind == BACKWARD_UP) && t.slot_maps && first + PANEL <= t.rows;
}
// Whether loading warp `warp` loads its operand of a weight gradient by TMA: A of GRAD_UP, B of GRAD_DOWN.
DEVICE bool slots_by_tma(const GemmTask& t, u32 warp) { return t.slot_maps && (t.kind == GRAD_UP) == (warp == 0); }
// The map for TMA loads of data that other threads have stored. The thread that found the task has acquired their stores, and this thread
// has synchronised with that thread. The fence orders the stores before the TMA loads.
DEVICE const TensorMap* slot_map(const GemmTask& t, u32 map) {
    dev::fence_proxy_async_global();
    return static_cast<const TensorMap*>(t.slot_maps) + map;
}

template <class Tile> struct Loader {
    char* stages;
    typename Tile::Control* control;
    u32 begun = 0;  // number of stages begun, over all tiles
};

// Waits until the next stage is free. Every thread waits itself, because each overwrites a part of the stage. `OVER_COPIES`: the other
// block of the CTA pair may have copied into its stage by cp.async.
template <bool OVER_COPIES = false, class Tile> DEVICE char* begin_stage(const Loader<Tile>& l) {
    u32 s = nth<Tile::STAGES>(l.begun);
    u64* empty = &l.control->empty[s];
    const u32 free = parity<Tile::STAGES>(l.begun) ^ 1;
    if constexpr (OVER_COPIES) wait_free<Tile>(empty, free);
    else dev::mbarrier_wait(empty, free);
    return l.stages + s * Tile::STAGE_BYTES;
}

// One thread, for its warp: announces `bytes` of TMA data for the stage; returns the barrier.
template <class Tile> DEVICE u64* expect(const Loader<Tile>& l, u32 bytes) {
    u64* full = &l.control->full[nth<Tile::STAGES>(l.begun)];
    dev::mbarrier_arrive_expect(full, bytes);
    dev::mbarrier_arrive(full, 31);  // for the other lanes, which issue no copies
    return full;
}
template <class Tile> DEVICE void end_stage(Loader<Tile>& l) {
    dev::cp_async_mbarrier_arrive(&l.control->full[nth<Tile::STAGES>(l.begun)]);
    l.begun++;
}

template <class T> DEVICE const T* shfl_pointer(const T* p, u32 lane) {
    return reinterpret_cast<const T*>(dev::shfl(reinterpret_cast<u64>(p), int(lane)));
}

// Number of parts of K that are loaded separately. In a gated BACKWARD_UP, K runs over gate's rows, then over up's. Gate and up are apart
// in memory, and neither may begin in the middle of a box.
DEVICE u32 k_halves(const GemmTask& t) { return t.kind == BACKWARD_UP && t.gated ? 2 : 1; }

DEVICE u32 task_stages(const GemmTask& t) {
    u32 halves = k_halves(t);
    return halves * ((gemm_k(t) / halves + TILE_K - 1) / TILE_K);
}

// One warp. Prefetches the epilogue's lines into L2: 32 after each of a tile's last stages, and any excess at its beginning. For weight
// gradients that accumulate, prefetch_early prefetches all lines.
template <class T, class Tile> DEVICE void prefetch_early(const GemmTask& t, u32 stages) {
    for (u32 group = 0, groups = finish_lines<TILE_M, Tile::N>(t) / 32; group + stages < groups; group++) {
        prefetch_finish_line<T, TILE_M, Tile::N>(t, group * 32 + dev::lane());
    }
}
// `left`: number of stages from this one on.
template <class T, class Tile> DEVICE void prefetch_line(const GemmTask& t, u32 left) {
    u32 groups = finish_lines<TILE_M, Tile::N>(t) / 32;
    if (left <= groups) prefetch_finish_line<T, TILE_M, Tile::N>(t, (groups - left) * 32 + dev::lane());
}

// TMA maps and coordinates of B. K-major: the first half of the panels are rows of `first`, the others of `second`. MN-major: all panels
// are columns of `first`, or of `second` in the second half of K.
struct WeightBoxes {
    const TensorMap *first, *second;
    u32 n_first, n_second;
};

template <class Tile> DEVICE WeightBoxes weight_boxes(const GemmTask& t) {
    auto* maps = static_cast<const TensorMap*>(t.tensor_maps);
    auto *gate = maps, *up = maps + 1, *down = maps + 2;
    switch (t.kind) {
        case FORWARD_UP:
            return t.gated ? WeightBoxes{gate, up, t.n0, t.n0} : WeightBoxes{up, up, t.n0, t.n0 + Tile::N / 2};
        case BACKWARD_UP: return t.gated ? WeightBoxes{gate, up, t.n0, t.n0} : WeightBoxes{up, up, t.n0, t.n0};
        default: return {down, down, t.n0, t.n0 + Tile::N / 2};
    }
}

// Loads B, i.e. weights: one warp, of which one thread issues the TMA loads.
template <class T, u32 KINDS, class Tile> DEVICE void load_weights(const GemmTask& t, Loader<Tile>& l) {
    const WeightBoxes boxes = weight_boxes<Tile>(t);
    const bool mn_major = b_mn_major<KINDS>(t.kind);
    const u32 halves = k_halves(t), half_k = gemm_k(t) / halves;
    u32 left = task_stages(t);
    if (KINDS != FORWARD_KINDS) prefetch_early<T, Tile>(t, left);
    for (u32 half = 0; half < halves; half++) {
        for (u32 k = 0; k < half_k; k += TILE_K) {
            // The first stages after a weight gradient overwrite the other block's cp.async data, which its consumers have fenced.
            const bool over_copies = Tile::CTA_PAIR && KINDS != FORWARD_KINDS && l.begun < l.control->copied_until;
            char* stage = over_copies ? begin_stage<true>(l) : begin_stage(l);
            if (dev::lane() == 0) {
                u64* full = expect(l, Tile::B_BYTES);
                if (over_copies) dev::fence_proxy_async_cluster();
                UNROLL for (u32 i = 0; i < Tile::B_PANELS / (Tile::CTA_PAIR ? 2 : 1); i++) {
                    const u32 p = first_panel<Tile>() + i;
                    char* panel = stage + A_BYTES + p * PANEL_BYTES;
                    if (mn_major) {
                        load_panel<Tile>(panel, half ? boxes.second : boxes.first, full, t.n0 + p * PANEL, k, t.expert);
                    } else {
                        constexpr u32 HALF = Tile::B_PANELS / 2;
                        u32 n = (p < HALF ? boxes.n_first : boxes.n_second) + p % HALF * PANEL;
                        load_panel<Tile>(panel, p < HALF ? boxes.first : boxes.second, full, k, n, t.expert);
                    }
                }
            }
            dev::sync_warp();
            l.begun++;
            if (KINDS != FORWARD_KINDS) prefetch_line<T, Tile>(t, left--);
        }
    }
}

// A slot that a faulty peer never filled has no row. A valid address takes its place, so that copies need no check.
template <class T> DEVICE const T* row_or_any(const T* row, const GemmTask& t) { return row ? row : static_cast<const T*>(t.up); }

// Loads the output rows of A by TMA: two warps, one panel each.
template <class Tile> DEVICE void load_rows(const GemmTask& t, Loader<Tile>& l) {
    const u32 row = t.first_slot + t.m0 + dev::warp() * PANEL;
    const TensorMap* map = slot_map(t, t.kind == FORWARD_DOWN ? OPERAND_H : t.gated ? OPERAND_GATE : OPERAND_UP);
    const u32 halves = k_halves(t), half_k = gemm_k(t) / halves;
    static_assert(OPERAND_UP == OPERAND_GATE + 1, "the second half's map");
    for (u32 half = 0; half < halves; half++, map++) {
        for (u32 k = 0; k < half_k; k += TILE_K) {
            char* stage = begin_stage(l);
            if (dev::lane() == 0) dev::tma_load_2d(stage + dev::warp() * PANEL_BYTES, map, expect(l, PANEL_BYTES), i32(k), i32(row));
            dev::sync_warp();
            l.begun++;
        }
    }
}

// Copies the output rows of A by cp.async: two warps, one panel each.
template <class T, class Tile> DEVICE void copy_rows(const GemmTask& t, Loader<Tile>& l) {
    constexpr u32 ADDRESS_BATCH = 8;  // addresses computed before the first copy; each copy keeps its address registers for a while
    const u32 warp = dev::warp(), lane = dev::lane(), piece = lane % 8, sub = lane / 8, first = t.m0 + warp * PANEL;
    // Lane i holds the pointers of the panel's lines i and 32 + i. Rows past the end alias the last row; their results are never stored.
    const RowSource<T> rows = a_rows<T>(t);
    const T* held[2];
    UNROLL for (u32 j = 0; j < 2; j++) {
        const u32 row = first + lane + 32 * j;
        held[j] = row_or_any(rows.row(row < t.rows ? row : t.rows - 1), t);
    }
    const u32 offset = warp * PANEL_BYTES + swizzled(sub, piece);
    const bool any = first < t.rows;  // otherwise the panel is not multiplied

    const u32 halves = k_halves(t), half_k = gemm_k(t) / halves;
    for (u32 half = 0; half < halves; half++) {
        for (u32 k = 0; k < half_k; k += TILE_K) {
            char* stage = begin_stage(l);
            const bool inside = k + piece * 8 < half_k;
            const u32 column = half * half_k + k + piece * 8;
            if (any) {
                UNROLL for (u32 begin = 0; begin < PANEL / 4; begin += ADDRESS_BATCH) {
                    const T* from[ADDRESS_BATCH];
                    UNROLL for (u32 j = 0; j < ADDRESS_BATCH; j++) from[j] = shfl_pointer(held[(begin + j) / 8], (begin + j) % 8 * 4 + sub) + column;
                    // Like `swizzled`: lines are 4 apart, which flips bit 2 of `line & 7` each time.
                    UNROLL for (u32 j = 0; j < ADDRESS_BATCH; j++)
                        dev::cp_async16(stage + (j % 2 ? offset ^ 64 : offset) + (begin + j) * (4 * 128), from[j], inside);
                }
            }
            end_stage(l);
        }
    }
}

// Whether this warp's panels of a weight gradient are multiplied: the first warp has A's two, the others two of B's each.
template <class Tile> DEVICE bool copies_slots(const GemmTask& t) {
    if (Tile::CTA_PAIR && t.m0 >= gemm_m(t)) return false;
    return Tile::B_PANELS / 2 == LOAD_WARPS - 1 || dev::warp() <= Tile::B_PANELS / 2;
}

// Weight gradients: copies operands by cp.async. Both are MN-major, with one line per slot.
template <class T, class Tile> DEVICE void copy_slots(const GemmTask& t, Loader<Tile>& l) {
    constexpr u32 ADDRESS_BATCH = 4;  // as in copy_rows
    const u32 warp = dev::warp(), lane = dev::lane(), piece = lane % 8, sub = lane / 8;
    const u32 first = warp == 0 ? t.m0 : t.n0 + (warp - 1) * 2 * PANEL, limit = warp == 0 ? gemm_m(t) : gemm_n(t);
    const u32 column = first + piece * 8;
    const bool inside[2] = {column < limit, column + PANEL < limit};
    const u32 offset = (warp == 0 ? 0 : A_BYTES + (warp - 1) * 2 * PANEL_BYTES) + swizzled(sub, piece);
    // Lane i holds the pointers of lines i and 32 + i, for this stage and for the next (loads in flight). The row source stays in shared
    // memory, because this loop has no registers to spare.
    RowSource<Bf16>& rows = l.control->rows[warp];
    if (lane == 0) rows = warp == 0 ? a_rows<Bf16>(t) : b_mn_major_rows<Bf16>(t);  // any 2-byte element type
    dev::sync_warp();
    auto row_of = [&](u32 i) { return row_or_any(reinterpret_cast<const T*>(rows.row(i)), t); };
    const T* next[2];
    UNROLL for (u32 j = 0; j < 2; j++) next[j] = row_of(lane + 32 * j);
    const bool any = copies_slots<Tile>(t);

    for (u32 k = 0; k < t.rows; k += TILE_K) {
        const T* held[2];
        UNROLL for (u32 j = 0; j < 2; j++) {
            held[j] = next[j];
            next[j] = row_of(k + TILE_K + lane + 32 * j);
        }
        char* stage = begin_stage(l);
        if (any) {
            UNROLL for (u32 begin = 0; begin < TILE_K / 4; begin += ADDRESS_BATCH) {
                const T* from[ADDRESS_BATCH];
                UNROLL for (u32 j = 0; j < ADDRESS_BATCH; j++) from[j] = shfl_pointer(held[(begin + j) / 8], (begin + j) % 8 * 4 + sub) + column;
                UNROLL for (u32 j = 0; j < ADDRESS_BATCH; j++) {
                    const bool row = k + 4 * (begin + j) + sub < t.rows;
                    char* line = stage + (j % 2 ? offset ^ 64 : offset) + (begin + j) * (4 * 128);
                    dev::cp_async16(line, from[j], row && inside[0]);
                    dev::cp_async16(line + PANEL_BYTES, from[j] + PANEL, row && inside[1]);
                }
            }
        }
        end_stage(l);
    }
}

// Loads the weight-gradient operand that lies in a slot array, one line per slot, with the same warps as copy_slots. Stages that span both
// parts of the batch, or its end, are copied by cp.async instead of TMA.
template <class T, class Tile> DEVICE void load_slots(const GemmTask& t, Loader<Tile>& l) {
    const u32 warp = dev::warp(), lane = dev::lane();
    const u32 first = warp == 0 ? t.m0 : t.n0 + (warp - 1) * 2 * PANEL, limit = warp == 0 ? gemm_m(t) : gemm_n(t);
    const u32 offset = warp == 0 ? 0 : A_BYTES + (warp - 1) * 2 * PANEL_BYTES;
    RowSource<Bf16>& rows = l.control->rows[warp];
    if (lane == 0) rows = warp == 0 ? a_rows<Bf16>(t) : b_mn_major_rows<Bf16>(t);  // any 2-byte element type
    dev::sync_warp();
    const TensorMap* map = slot_map(t, warp > 0 ? OPERAND_H : t.gated && !t.which ? OPERAND_GATE : OPERAND_UP);
    const bool any = copies_slots<Tile>(t);

    for (u32 k = 0; k < t.rows; k += TILE_K) {
        char* to = begin_stage(l) + offset;
        if (any && k + TILE_K <= t.rows && (k >= t.split || k + TILE_K <= t.split)) {
            if (lane == 0) {
                u64* full = expect(l, 2 * PANEL_BYTES);
                const u32 slot = t.first_slot + k + (k < t.split ? 0 : t.jump);
                for (u32 p = 0; p < 2; p++) dev::tma_load_2d(to + p * PANEL_BYTES, map, full, i32(first + p * PANEL), i32(slot));
            }
            dev::sync_warp();
            l.begun++;
            continue;
        }
        ROLLED for (u32 i = lane; any && i < 2 * PANEL * 8; i += 32) {
            const u32 p = i / (PANEL * 8), line = i / 8 % PANEL, piece = i % 8, column = first + p * PANEL + piece * 8;
            const T* from = row_or_any(reinterpret_cast<const T*>(rows.row(k + line)), t) + column;
            dev::cp_async16(to + p * PANEL_BYTES + swizzled(line, piece), from, k + line < t.rows && column < limit);
        }
        end_stage(l);
    }
}

// Main loop of the loading warps: loads all tasks in queue order.
template <class T, u32 KINDS, class Tile> DEVICE void load_loop(Loader<Tile> l) {
    // Orders the peer CTA's earlier accesses to its stages before our multicast TMA writes.
    if (Tile::CTA_PAIR && dev::thread() == (LOAD_WARPS - 1) * 32) dev::fence_proxy_async_cluster();
    for (u32 n = 0;; n++) {
        const Entry& entry = l.control->entry[nth<ENTRIES>(n)];
        dev::mbarrier_wait(&l.control->filled[nth<ENTRIES>(n)], parity<ENTRIES>(n));
        if (!entry.more) break;
        if (a_mn_major<KINDS>(entry.task.kind)) {
            // All lines are prefetched at once, because the loop has no registers to spare.
            if (dev::warp() == LOAD_WARPS - 1) prefetch_early<T, Tile>(entry.task, 0);
            if (slots_by_tma(entry.task, dev::warp())) load_slots<T>(entry.task, l);
            else copy_slots<T>(entry.task, l);
            if (Tile::CTA_PAIR && dev::thread() == (LOAD_WARPS - 1) * 32)
                l.control->copied_until = l.begun + (ARISTOS_FAULT(COPIES_FORGOTTEN) ? 0 : Tile::STAGES);
        } else if (dev::warp() < ROW_WARPS) {
            if (rows_by_tma(entry.task, entry.task.m0 + dev::warp() * PANEL)) load_rows(entry.task, l);
            else copy_rows<T>(entry.task, l);
        } else {
            load_weights<T, KINDS>(entry.task, l);
        }
        dev::sync_warp();
        if (dev::lane() == 0) dev::mbarrier_arrive(&l.control->done[nth<ENTRIES>(n)]);
    }
}

}  // namespace hopper
}  // namespace aristos
#endif
