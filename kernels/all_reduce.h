// aristos_all_reduce: the gradients of replicated weights, summed over all PEs in the order of PEs.
//
// The gradients one after another are one vector. Each PE owns 1/n of it, cut into pieces; piece g belongs to channel
// g mod channels, its number there is its step. A channel is one block on every PE, independent of the other channels. In each
// iteration a block
//   sends   its values of step i of every owner's part to the owner;
//   reduces step i - 1 of its own part: waits for all PEs' values, sums them in the order of PEs, sends the sums to all;
//   copies  the sums of step i - 2 of the others' parts to where they belong.
// REDUCE_SLOTS places are used round robin, one by each step. Values of step i + REDUCE_SLOTS leave only after the sums of step i came back,
// which the owner sends after it has read the values of step i: so a place is free when it is written, and values tell the
// owner that the place of the sums of REDUCE_SLOTS steps before is free too. There is no other acknowledgement. The same holds
// from pass to pass: values leave only after all sums of the last pass have come.
//
// No cyclic wait: sums of step i wait for values of step i alone, and values of step i for sums of step
// i - REDUCE_SLOTS at most.
#pragma once
#include "protocol.h"
#include "route_math.h"

namespace aristos {

static_assert(REDUCE_SLOTS >= 3, "values, sums and copies are a step apart each");

// The vector: gradients in the order of `replicated` (src/moe/cpu/layer.rs), each rounded up to 16 bytes.
struct ReduceVector {
    u32 segments;
    u64 start[REDUCE_SEGMENTS + 1];
    u64 count[REDUCE_SEGMENTS];
    float* data[REDUCE_SEGMENTS];

    DEVICE void add(float* p, u64 elements) {
        data[segments] = p;
        count[segments] = elements;
        start[segments + 1] = start[segments] + reduce_round(elements);
        segments++;
    }
};

DEVICE void list_gradients(const Layer& layer, ReduceVector& v) {
    const LayerShape& s = layer.shape;
    const u64 h = s.hidden, i = s.shared_intermediate;
    v.segments = 0;
    v.start[0] = 0;
    v.add(layer.tables.grad_router, s.n_experts * h);
    if (i == 0) return;
    const MlpGradients& g = layer.tables.gradients[s.n_local];
    if (s.shared_gated) v.add(g.gate, i * h);
    v.add(g.up, i * h);
    v.add(g.down, h * i);
    if (s.shared_bias) {
        if (s.shared_gated) v.add(g.gate_bias, i);
        v.add(g.up_bias, i);
        v.add(g.down_bias, h);
    }
    if (s.shared_gate) v.add(layer.tables.grad_shared_gate, h);
}

struct Vec4 { float v[4]; };

// Four elements of the vector from `at`, a multiple of 4; the padding of a segment reads as zero and is not written.
DEVICE Vec4 read4(const ReduceVector& v, u64 at) {
    u32 g = 0;
    while (at >= v.start[g + 1]) g++;
    const u64 in = at - v.start[g];
    Vec4 x{};
    if (in + 4 <= v.count[g]) {
        const Vec16 bits = dev::load16(v.data[g] + in);
        UNROLL
        for (u32 i = 0; i < 4; i++) x.v[i] = bits_float(bits.w[i]);
    } else {
        UNROLL
        for (u32 i = 0; i < 4; i++) x.v[i] = in + i < v.count[g] ? v.data[g][in + i] : 0.0f;
    }
    return x;
}

DEVICE Vec16 as_bits(const Vec4& x) {
    return {{float_bits(x.v[0]), float_bits(x.v[1]), float_bits(x.v[2]), float_bits(x.v[3])}};
}

DEVICE void write4(const ReduceVector& v, u64 at, const Vec4& x) {
    u32 g = 0;
    while (at >= v.start[g + 1]) g++;
    const u64 in = at - v.start[g];
    if (in + 4 <= v.count[g]) {
        dev::store16(v.data[g] + in, as_bits(x));
    } else {
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            if (in + i < v.count[g]) v.data[g][in + i] = x.v[i];
        }
    }
}

// One block's channel.
struct Reducer {
    const Layer& layer;
    const ReduceVector& vector;
    ReduceShape r;
    u32 me, n, channel;
    u64 pass;
    u64 area;  // elements of one PE's places

    DEVICE Reducer(const Layer& l, const ReduceVector& v, const Pass& p)
        : layer(l), vector(v), r(reduce_shape(l.shape)), me(l.shape.my_pe), n(l.shape.n_pes), channel(dev::block()),
          pass(counted(l, p)), area(reduce_area(l.shape) / 4) {}

    // Where the piece of an owner and a step begins in the vector, and its elements, 0 beyond the end.
    DEVICE u64 begin(u32 owner, u32 step) const {
        return owner * r.per_pe + (u64(step) * r.channels + channel) * r.piece;
    }
    DEVICE u32 length(u32 owner, u32 step) const {
        const u64 part = (owner + 1) * r.per_pe, end = part < r.elements ? part : r.elements;
        const u64 from = begin(owner, step);
        if (step >= r.steps || from >= end) return 0;
        return end - from < r.piece ? u32(end - from) : r.piece;
    }
    // Places in this PE's memory, of values (area 0), sums (1), outgoing values (2); `pe` is the other PE.
    DEVICE float* place(u32 kind, u32 pe, u32 step) const {
        float* base = reinterpret_cast<float*>(layer.symmetric.all_reduce) + (u64(kind) * n + pe) * area;
        return base + (u64(channel) * REDUCE_SLOTS + step % REDUCE_SLOTS) * r.piece;
    }
    // Sums to be put over the network, the same for all PEs.
    DEVICE float* sums_out(u32 step) const { return place(3, 0, step); }
    // A word for each place, not for each pair: on a network the signals of two steps may overtake each other, and a word must
    // not go backwards. Whoever sets it knows that its last value was seen, as it knows that the place is free.
    DEVICE u64* signal(u32 kind, u32 pe, u32 step) const {
        u64* words = layer.symmetric.all_reduce_signal + ((u64(kind) * n + pe) * r.channels + channel) * REDUCE_SLOTS;
        return words + step % REDUCE_SLOTS;
    }
    DEVICE u64 stamp_of(u32 step) const { return (pass << STEP_BITS) + step + 1; }
    DEVICE Waiting waiting(u32 pe, u32 step) const {
        return {pe, WHAT_ALL_REDUCE, PHASE_ALL_REDUCE, stamp_of(step), u64(step) * r.channels + channel};
    }

    // This PE's values of a step to every other PE, the next one first.
    DEVICE void send(u32 step) const {
        for (u32 i = 1; i < n; i++) {
            const u32 pe = (me + i) % n, count = length(pe, step);
            if (count == 0) continue;
            const bool direct = reachable(layer, pe);
            float* to = direct ? at_peer(layer, place(0, me, step), pe) : place(2, pe, step);
            for (u32 e = dev::thread() * 4; e < count; e += REDUCE_THREADS * 4)
                dev::store16(to + e, as_bits(read4(vector, begin(pe, step) + e)));
            if (!direct) dev::fence_sys();  // the network card reads it
            dev::sync_block();
            if (!direct) dev::put_block(place(0, me, step), to, u64(count) * 4, pe);
            else if (dev::thread() == 0) signal_peer(layer, signal(0, me, step), stamp_of(step), pe);
            count_put(count);
        }
        signal_network(step, 0, [&](u32 pe) { return length(pe, step) > 0; });
    }

    // Sums a step of the own part and sends the sums. False: some PE's values did not come.
    DEVICE bool reduce(u32 step) const {
        const u32 count = length(me, step);
        if (count == 0) return true;
        bool ok = true;
        for (u32 pe = dev::thread(); pe < n && ok; pe += REDUCE_THREADS) {
            if (pe != me) ok = wait_signal(layer, signal(0, pe, step), waiting(pe, step));
        }
        if (dev::sync_block_or(!ok)) return false;
        see_network(layer);
        for (u32 e = dev::thread() * 4; e < count; e += REDUCE_THREADS * 4) {
            Vec4 sum{};
            for (u32 pe = 0; pe < n; pe++) {
                Vec4 x;
                if (pe == me) {
                    x = read4(vector, begin(me, step) + e);
                } else {
                    const Vec16 bits = dev::load16(place(0, pe, step) + e);
                    UNROLL
                    for (u32 i = 0; i < 4; i++) x.v[i] = bits_float(bits.w[i]);
                }
                UNROLL
                for (u32 i = 0; i < 4; i++) sum.v[i] = pe == 0 ? x.v[i] : sum.v[i] + x.v[i];
            }
            write4(vector, begin(me, step) + e, sum);
            for (u32 i = 1; i < n; i++) {
                const u32 pe = (me + i) % n;
                if (reachable(layer, pe)) dev::store16(at_peer(layer, place(1, me, step), pe) + e, as_bits(sum));
            }
            if (layer.shape.stage) dev::store16(sums_out(step) + e, as_bits(sum));
        }
        if (layer.shape.stage) dev::fence_sys();
        dev::sync_block();
        for (u32 pe = dev::thread(); pe < n; pe += REDUCE_THREADS) {
            if (pe != me && reachable(layer, pe)) signal_peer(layer, signal(1, me, step), stamp_of(step), pe);
        }
        for (u32 i = 1; i < n; i++) {
            const u32 pe = (me + i) % n;
            if (!reachable(layer, pe)) dev::put_block(place(1, me, step), sums_out(step), u64(count) * 4, pe);
            count_put(count);
        }
        signal_network(step, 1, [&](u32) { return true; });
        return true;
    }

    // The sums of a step of the others' parts to where they belong. False: some did not come.
    DEVICE bool copy(u32 step) const {
        bool ok = true;
        for (u32 pe = dev::thread(); pe < n && ok; pe += REDUCE_THREADS) {
            if (pe != me && length(pe, step) > 0) ok = wait_signal(layer, signal(1, pe, step), waiting(pe, step));
        }
        if (dev::sync_block_or(!ok)) return false;
        see_network(layer);
        for (u32 i = 1; i < n; i++) {
            const u32 pe = (me + i) % n, count = length(pe, step);
            for (u32 e = dev::thread() * 4; e < count; e += REDUCE_THREADS * 4) {
                const Vec16 bits = dev::load16(place(1, pe, step) + e);
                Vec4 x;
                UNROLL
                for (u32 j = 0; j < 4; j++) x.v[j] = bits_float(bits.w[j]);
                write4(vector, begin(pe, step) + e, x);
            }
        }
        dev::sync_block();
        return true;
    }

    // After puts of a step: the signals of those that went over the network.
    template <class Sent> DEVICE void signal_network(u32 step, u32 kind, Sent sent) const {
        if (!layer.shape.stage || dev::thread() != 0) return;
        signal_puts(layer, [&](u32 pe) { return sent(pe) ? signal(kind, me, step) : nullptr; }, stamp_of(step));
    }

    DEVICE void count_put(u32 elements) const {
        if (dev::thread() != 0) return;
        dev::fetch_add(&layer.stats->all_reduce_bytes, u64(elements) * 4);
    }
};

KERNEL(aristos_all_reduce, 256, 1)(const Layer* layer, Pass pass) {
    if (layer->shape.n_pes == 1 || aborted(*layer)) return;
    ReduceVector& vector = *reinterpret_cast<ReduceVector*>(dev::shared());
    if (dev::thread() == 0) list_gradients(*layer, vector);
    dev::sync_block();
    const Reducer reducer(*layer, vector, pass);
    for (u32 turn = 0; turn < reducer.r.steps + 2; turn++) {
        if (turn < reducer.r.steps) reducer.send(turn);
        if (turn >= 1 && !reducer.reduce(turn - 1)) return;
        if (turn >= 2 && !reducer.copy(turn - 2)) return;
    }
}
REGISTER_KERNEL(aristos_all_reduce)

}  // namespace aristos
