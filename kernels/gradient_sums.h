// Sums gradients that several PEs hold, in the order of the holders. An expert's gradients are summed over all PEs of the world that hold
// it (replicas and groups), those of the replicated weights over all PEs.
//
// All gradients of such a unit (SumUnit) form one vector. Each of its K holders sums one part, 1/K of it, divided into pieces. Piece g of
// a part belongs to channel g mod channels and is step g / channels there. One block at a time works on a channel. The block goes through
// the PE's units in the order of experts; for every step of a unit, in this order, it
//   sends    its values to the holder of each part;
//   reduces  its own part: when all holders' values have arrived, it sums them in holder order and sends the sums to all;
//   copies   the sums of the other parts to the gradients.
// Backward's persistent kernel runs the steps whose dependencies are met between its tasks: an expert's gradients are sent while those of
// the next are computed. aristos_all_reduce finishes the remaining steps, with waits, and ends with the replicated weights, whose
// gradients are computed last.
//
// Any two PEs number the steps of all units that both hold consecutively, and use REDUCE_SLOTS buffers round robin, one per step. A PE
// sends the values of step i + REDUCE_SLOTS - 1 only after it has copied the sums of step i. The peer sent those sums after it had read the
// values of step i, so the buffer for values is free when it is written. A value also shows its receiver that the sender's buffer for the
// sums of REDUCE_SLOTS steps earlier is free. There are no other acknowledgements. This also holds across passes, because values are sent
// only after all sums of the previous pass have arrived.
//
// Over the network the signals of all channels for one step and one kind (values or sums) share a fence. The channel that puts its piece
// last sends them all. Channels are otherwise independent, and none waits for another channel of its PE.
//
// There are no cyclic waits: units are in the same order on all PEs, a send waits for no peer, and before it sends a step a PE waits only
// for values and sums of earlier steps, in that order. Signalling only after all channels of the sender have put their pieces preserves
// this order.
#pragma once
#include "route_math.h"
#include "world.h"

namespace aristos {

static_assert(REDUCE_SLOTS >= 3, "values, sums and copies are a step apart each");
constexpr u32 REDUCE_AHEAD = REDUCE_SLOTS - 1;  // maximum number of steps sent but not copied

// The gradients of a unit as one vector: those of the replicated weights in the order of `replicated` (src/moe/spec/gradients.rs), or an
// expert's matrices and biases. Each array is padded to 16 bytes.
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
    DEVICE void add(const MlpGradients& g, u64 h, u64 i, bool gated, bool bias) {
        if (gated) add(g.gate, i * h);
        add(g.up, i * h);
        add(g.down, h * i);
        if (!bias) return;
        if (gated) add(g.gate_bias, i);
        add(g.up_bias, i);
        add(g.down_bias, h);
    }
};

DEVICE void list_gradients(const Layer& layer, u32 batch, ReduceVector& v) {
    const LayerShape& s = layer.shape;
    v.segments = 0;
    v.start[0] = 0;
    if (batch != NONE) return v.add(mlp_gradients(layer, batch), s.hidden, s.intermediate, s.gated, s.bias);
    v.add(layer.tables.grad_router, u64(s.n_experts) * s.hidden);
    if (s.shared_intermediate == 0) return;
    v.add(layer.tables.shared_gradients, s.hidden, s.shared_intermediate, s.shared_gated, s.shared_bias);
    if (s.shared_gate) v.add(layer.tables.grad_shared_gate, s.hidden);
}

struct Vec4 { float v[4]; };

// Four elements of the vector from `at`, a multiple of 4. Padding reads as zero and is not written.
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

// A step of a unit, with values derived from the unit.
struct SumStep {
    u32 number, step, steps;  // unit, step in the unit, number of its steps; steps 0: no units left
    u32 steps_before;                // steps of all earlier units
    SumUnit unit;
    const SumHolder* holders;
    u64 part, elements;
};

// One thread. Sets `t` to the first step of unit `number`. With a caller's routing the replicated weights, which are the last unit, have no
// gradients.
DEVICE void begin_unit(const Layer& l, const Pass& pass, SumStep& t, u32 number) {
    const LayerShape& s = l.shape;
    t.number = number;
    t.step = t.steps = 0;
    t.unit = l.tables.sum_units[number];
    if (t.unit.parts == 0 || (t.unit.batch == NONE && routed_by_caller(pass))) return;
    t.holders = l.tables.sum_holders + t.unit.first;
    t.elements = t.unit.batch == NONE ? reduce_elements(s) : expert_elements(s);
    t.part = reduce_part(t.elements, t.unit.parts);
    t.steps = reduce_steps(s, t.elements, t.unit.parts);
}
DEVICE void begin_sum_step(const Layer& l, const Pass& pass, SumStep& t, const SumCursor& at) {
    begin_unit(l, pass, t, dev::load_relaxed(&at.unit));
    t.step = dev::load_relaxed(&at.step);
    t.steps_before = dev::load_relaxed(&at.steps_before);
}
// A step with its vector.
struct VectorStep : SumStep {
    ReduceVector vector;

    DEVICE void list(const Layer& l) {
        if (steps > 0) list_gradients(l, unit.batch, vector);
    }
};

// One channel, for the block that works on it.
struct Reducer {
    const Layer& layer;
    ReduceShape r;
    u32 channel;
    u64 pass;
    PassStats* stats;  // counts the puts
    u64 area;    // elements of one PE's buffers

    DEVICE Reducer(const Layer& l, u64 of_pass, u32 of_channel, PassStats* counted)
        : layer(l), r(reduce_shape(l.shape)), channel(of_channel), pass(of_pass), stats(counted), area(reduce_area(l.shape) / 4) {}

    // First element and length of a holder's piece in the vector; length 0 past the end.
    DEVICE u64 begin(const SumStep& t, u32 holder, u32 of_channel) const {
        return holder * t.part + (u64(t.step) * r.channels + of_channel) * r.piece;
    }
    DEVICE u64 begin(const SumStep& t, u32 holder) const { return begin(t, holder, channel); }
    DEVICE u32 length(const SumStep& t, u32 holder, u32 of_channel) const {
        const u64 part = (holder + 1) * t.part, end = part < t.elements ? part : t.elements, from = begin(t, holder, of_channel);
        if (from >= end) return 0;
        return end - from < r.piece ? u32(end - from) : r.piece;
    }
    DEVICE u32 length(const SumStep& t, u32 holder) const { return length(t, holder, channel); }
    // The step's number among the steps shared with a holder.
    DEVICE u32 number(const SumStep& t, u32 holder) const { return t.holders[holder].before + t.step; }
    DEVICE float* at(u64 areas, u32 slot) const {
        return reinterpret_cast<float*>(layer.symmetric.all_reduce) + areas * area + (u64(channel) * REDUCE_SLOTS + slot % REDUCE_SLOTS) * r.piece;
    }
    // Buffers in this PE's memory for values (kind 0), sums (1) and outgoing values (2); `pe` is the other PE.
    DEVICE float* buffer(u32 kind, u32 pe, u32 number) const { return at(u64(kind) * layer.shape.n_world + pe, number); }
    // Outgoing sums for the network, the same for all holders.
    DEVICE float* sums_out(u32 step) const { return at(u64(3) * layer.shape.n_world, step); }
    // There is a word per buffer, not per pair of PEs: over a network the signals of two steps may arrive out of order, and a word must
    // not decrease. The sender knows that the previous value was seen, since it knows that the buffer is free.
    DEVICE u64* signal(u32 kind, u32 pe, u32 number, u32 of_channel) const {
        u64* words = layer.symmetric.all_reduce_signal + ((u64(kind) * layer.shape.n_world + pe) * r.channels + of_channel) * REDUCE_SLOTS;
        return words + number % REDUCE_SLOTS;
    }
    DEVICE u64* signal(u32 kind, u32 pe, u32 number) const { return signal(kind, pe, number, channel); }
    DEVICE u64 stamp_of(u32 number) const { return (pass << STEP_BITS) + number + 1; }
    // One thread. Waits for a holder's values or sums of a step.
    DEVICE bool wait_for(const SumStep& t, u32 kind, u32 holder) const {
        const u32 pe = t.holders[holder].pe, of = number(t, holder);
        return wait_signal(layer, signal(kind, pe, of), {pe, WHAT_ALL_REDUCE, PHASE_ALL_REDUCE, stamp_of(of), u64(of) * r.channels + channel});
    }
    // Sends this PE's values of a step to every other holder, starting with the next holder.
    DEVICE void send(const VectorStep& t) const {
        const u32 me = layer.shape.world_pe, parts = t.unit.parts;
        for (u32 i = 1; i < parts; i++) {
            const u32 holder = (t.unit.me + i) % parts, pe = t.holders[holder].pe, count = length(t, holder), of = number(t, holder);
            if (count == 0) continue;
            const bool direct = reaches(layer, pe);
            float* to = direct ? at_world(layer, buffer(0, me, of), pe) : buffer(2, pe, of);
            for (u32 e = dev::thread() * 4; e < count; e += dev::threads() * 4)
                dev::store16(to + e, as_bits(read4(t.vector, begin(t, holder) + e)));
            if (!direct) dev::fence_sys();  // for the network card
            dev::sync_block();
            if (!direct) dev::put_block(buffer(0, me, of), to, u64(count) * 4, pe);
            else if (dev::thread() == 0) signal_world(layer, signal(0, me, of), stamp_of(of), pe);
            count_put(count, !direct);
        }
        signal_network(t, 0);
    }

    // Sums a step of this PE's part and sends the sums. False if a holder's values did not arrive.
    DEVICE bool reduce(const VectorStep& t) const {
        const u32 me = layer.shape.world_pe, mine = t.unit.me, parts = t.unit.parts, count = length(t, mine);
        if (count == 0) return signal_network(t, 1), true;
        bool ok = true;
        for (u32 holder = dev::thread(); holder < parts && ok; holder += dev::threads())
            if (holder != mine) ok = wait_for(t, 0, holder);
        if (dev::sync_block_or(!ok)) return false;
        acquire_network(layer);
        // Puts of another unit's sums may still read sums_out, because the holders of that unit have not acknowledged the sums.
        if (layer.shape.stage && t.step == 0) {
            if (dev::thread() == 0) dev::quiet_puts();
            dev::sync_block();
        }
        for (u32 e = dev::thread() * 4; e < count; e += dev::threads() * 4) {
            Vec4 sum{};
            for (u32 holder = 0; holder < parts; holder++) {
                Vec4 x;
                if (holder == mine) {
                    x = read4(t.vector, begin(t, mine) + e);
                } else {
                    const Vec16 bits = dev::load16(buffer(0, t.holders[holder].pe, number(t, holder)) + e);
                    UNROLL
                    for (u32 i = 0; i < 4; i++) x.v[i] = bits_float(bits.w[i]);
                }
                UNROLL
                for (u32 i = 0; i < 4; i++) sum.v[i] = holder == 0 ? x.v[i] : sum.v[i] + x.v[i];
            }
            write4(t.vector, begin(t, mine) + e, sum);
            for (u32 i = 1; i < parts; i++) {
                const u32 holder = (mine + i) % parts, pe = t.holders[holder].pe;
                if (reaches(layer, pe)) dev::store16(at_world(layer, buffer(1, me, number(t, holder)), pe) + e, as_bits(sum));
            }
            if (layer.shape.stage) dev::store16(sums_out(t.step) + e, as_bits(sum));
        }
        if (layer.shape.stage) dev::fence_sys();
        dev::sync_block();
        for (u32 holder = dev::thread(); holder < parts; holder += dev::threads()) {
            const u32 pe = t.holders[holder].pe, of = number(t, holder);
            if (holder != mine && reaches(layer, pe)) signal_world(layer, signal(1, me, of), stamp_of(of), pe);
        }
        for (u32 i = 1; i < parts; i++) {
            const u32 holder = (mine + i) % parts, pe = t.holders[holder].pe;
            const bool inter_node = !reaches(layer, pe);
            if (inter_node) dev::put_block(buffer(1, me, number(t, holder)), sums_out(t.step), u64(count) * 4, pe);
            count_put(count, inter_node);
        }
        signal_network(t, 1);
        return true;
    }

    // Copies the sums of a step of the other parts to the gradients. False if some did not arrive.
    DEVICE bool copy(const VectorStep& t) const {
        const u32 parts = t.unit.parts;
        bool ok = true;
        for (u32 holder = dev::thread(); holder < parts && ok; holder += dev::threads())
            if (holder != t.unit.me && length(t, holder) > 0) ok = wait_for(t, 1, holder);
        if (dev::sync_block_or(!ok)) return false;
        acquire_network(layer);
        for (u32 i = 1; i < parts; i++) {
            const u32 holder = (t.unit.me + i) % parts, count = length(t, holder);
            const float* from = buffer(1, t.holders[holder].pe, number(t, holder));
            for (u32 e = dev::thread() * 4; e < count; e += dev::threads() * 4) {
                const Vec16 bits = dev::load16(from + e);
                Vec4 x;
                UNROLL
                for (u32 j = 0; j < 4; j++) x.v[j] = bits_float(bits.w[j]);
                write4(t.vector, begin(t, holder) + e, x);
            }
        }
        dev::sync_block();
        return true;
    }

    // One thread. Whether a channel puts values (kind 0) or sums (1) of a step to a holder over the network.
    DEVICE bool puts_inter_node(const SumStep& t, u32 kind, u32 holder, u32 of_channel) const {
        return !reaches(layer, t.holders[holder].pe) && length(t, kind == 0 ? holder : t.unit.me, of_channel) > 0;
    }
    // Whether any channel puts values or sums of a step to a holder over the network. If any does, channel 0 does, because it has the first
    // of a step's pieces.
    DEVICE bool any_inter_node(const SumStep& t, u32 kind) const {
        bool any = false;
        ROLLED
        for (u32 holder = 0; holder < t.unit.parts; holder++) any = any || puts_inter_node(t, kind, holder, 0);
        return any;
    }
    // All threads, after a channel's puts of a step, even if the channel has no puts. The last channel sends the signals of all network
    // puts after one fence. A step without network puts on any channel has no fence.
    DEVICE void signal_network(const SumStep& t, u32 kind) const {
        if (!layer.shape.stage) return;
        dev::sync_block();
        if (dev::thread() != 0 || !any_inter_node(t, kind)) return;
        u32* ended = layer.channels_done + u64(kind) * max_sum_steps(layer.shape) + t.steps_before;
        if (dev::fetch_add_acq_rel(ended, 1u) + 1 < r.channels && !ARISTOS_FAULT(EARLY_GROUP_SIGNAL)) return;
        dev::store_relaxed(ended, 0u);  // for the next pass
        dev::fence_puts();
        u32 sent = 0;
        ROLLED
        for (u32 c = 0; c < r.channels; c++) {
            ROLLED
            for (u32 i = 1; i < t.unit.parts; i++) {
                const u32 holder = (t.unit.me + i) % t.unit.parts, of = number(t, holder);
                if (!puts_inter_node(t, kind, holder, c)) continue;
                signal_world(layer, signal(kind, layer.shape.world_pe, of, c), stamp_of(of), t.holders[holder].pe);
                sent++;
            }
        }
        dev::fetch_add(&stats->fences, u64(1));
        dev::fetch_add(&stats->signals, u64(sent));
    }

    // Signals of direct stores are counted here, those of network puts in signal_network.
    DEVICE void count_put(u32 elements, bool inter_node) const {
        if (dev::thread() != 0) return;
        dev::fetch_add(&stats->puts, u64(1));
        dev::fetch_add(&stats->all_reduce_bytes, u64(elements) * 4);
        if (inter_node) dev::fetch_add(&stats->network_bytes, u64(elements) * 4);
        else dev::fetch_add(&stats->signals, u64(1));
    }
};

}  // namespace aristos
