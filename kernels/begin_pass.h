// aristos_begin_pass: the first kernel of a pass over a caller's memory. The kernel gets the pass's `Layer` and tensor maps by value and
// writes them to the state, so that the host needs no copy per call. The kernel also prepares the other words of the state for the pass.
//
// The state is one array of the caller: the maps of the weights, the `Layer`, a `StateOrigin`, and the local block. The caller may move the
// state and x between a forward and its backward. In that case only the row pointers in `Batches::routed` must be adjusted, because all
// other words of the local block are numbers.
#pragma once
#include "layer.h"
#include "platform.h"

namespace aristos {

struct Begin {
    Layer layer;
    BeginArgs args;
};
static_assert(sizeof(Begin) <= 4096, "kernel parameters");
static_assert(sizeof(Layer) % 8 == 0, "the host appends the arguments to the bytes of a Layer");

constexpr u32 BEGIN_THREADS = 256;

// All threads of one block.
DEVICE void copy_words(u64* to, const void* from, u64 bytes) {
    for (u64 i = dev::thread(); i < bytes / 8; i += dev::threads()) to[i] = static_cast<const u64*>(from)[i];
}

// Moves a pointer into [from, from + bytes) to the same offset of `to`. False if it points elsewhere.
DEVICE bool move_pointer(u64& pointer, u64 from, u64 bytes, u64 to) {
    if (pointer < from || pointer - from >= bytes) return false;
    pointer = to + (pointer - from);
    return true;
}

// All threads of one block. Adjusts the pointers to rows if the state or x has moved since the forward.
DEVICE void move_rows(const Layer& l, const BeginArgs& a) {
    const StateOrigin old = *a.origin;
    if (old.state == a.now.state && old.x == a.now.x) return;
    u64* rows = reinterpret_cast<u64*>(l.batches.routed.x_row);
    for (u64 i = dev::thread(); i < l.batches.routed.capacity; i += dev::threads()) {
        u64 row = rows[i];
        if (move_pointer(row, old.x, old.x_bytes, a.now.x) || move_pointer(row, old.state, old.state_bytes, a.now.state)) rows[i] = row;
    }
}

// All threads of all blocks. Zeroes the words that must be zero before a forward, except those of `ControlWords`.
DEVICE void zero_words(const BeginArgs& a) {
    for (u64 i = u64(dev::block()) * dev::threads() + dev::thread(); i < a.zero_bytes / 16; i += u64(dev::blocks()) * dev::threads()) {
        if (i * 16 >= sizeof(ControlWords)) dev::store16(reinterpret_cast<char*>(a.zero) + i * 16, Vec16{{0, 0, 0, 0}});
    }
}

// A backward is launched with one block.
KERNEL(aristos_begin_pass, BEGIN_THREADS, 2)(Begin begin) {
    const Layer& l = begin.layer;
    const BeginArgs& a = begin.args;
    if (!a.backward) zero_words(a);
    if (dev::block() != 0) return;
    u64* control = reinterpret_cast<u64*>(l.control);
    for (u32 i = dev::thread(); i < sizeof(ControlWords) / 8 && !a.backward; i += dev::threads()) control[i] = 0;
    if (a.backward) move_rows(l, a);
    dev::sync_block();
    copy_words(reinterpret_cast<u64*>(a.layer), &l, sizeof l);
    if (l.tables.tensor_maps) copy_words(static_cast<u64*>(const_cast<void*>(l.tables.tensor_maps)), a.weight_maps, sizeof a.weight_maps);
    if (l.batches.routed.slot_maps) copy_words(static_cast<u64*>(const_cast<void*>(static_cast<const void*>(l.batches.routed.slot_maps))), a.slot_maps, sizeof a.slot_maps);
    dev::tensor_maps_written();
    if (dev::thread() != 0) return;
    *a.origin = a.now;
    // After an error no later pass begins on this PE. Peers then report a timeout instead of using wrong results.
    if (dev::load_relaxed(&l.tables.host_errors->stopped.kind) != ERROR_NONE) l.error->kind = ERROR_ABORTED;
}
REGISTER_KERNEL(aristos_begin_pass)

}  // namespace aristos
