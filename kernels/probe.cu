// Kernels of `aristos probe` on devices: the time of a message from one PE's device to another's (src/run/probe/links.rs;
// docs/planner.md, "Probe"). Unlike in p2p.cu, the receiver reads the data as a layer does, any two of many PEs can be measured, and all
// can send at once.
//
// A message is split into one part per block of the grid, which has the same size at both ends. Block b of the receiver copies part b out
// of its symmetric memory and answers block b. Every word of `messages`, `answers` and `meetings` has one writer and never decreases. All
// times are from the sender's clock, from before the first byte to the last answer.
#include "platform.h"

namespace aristos {
using namespace dev;

enum ProbeWhat : u32 { PROBE_NOTHING = 0, PROBE_MESSAGE = 1, PROBE_ANSWER = 2, PROBE_MEETING = 3, PROBE_OWN_BLOCK = 4 };

// This PE's own memory. All of it except `numbers` is zeroed before a launch.
struct ProbeControl {
    u64 go;      // current iteration, set by block 0; lowest bit: it is the last
    u32 done;    // blocks that have finished, over all iterations
    u32 failed;  // 1 after a timeout: all blocks leave
    u32 what, pe;
    u64 expected, seen;
    u64 count;       // timed iterations
    u64 ns, cycles;  // of all iterations of the kernel: gives the clock rate
};

struct ProbeArea {
    // Symmetric.
    u64* messages;  // [n_pes][blocks], by sender and block: number of its last message << 1; lowest bit: no other message follows
    u64* answers;   // [n_pes][blocks], by receiver and block: number of the last message that it has copied
    u64* meetings;  // [n_pes]: last barrier that each PE has entered
    u8* sent;
    u8* received;
    // Local to this PE.
    u8* taken;
    u64* numbers;  // [2][n_pes][blocks]: number of the last message sent to, and received from, a PE
    u64* cycles;   // [repetitions]
    ProbeControl* control;
    u64 limit_ns, budget_ns;
    u64 meeting;  // number of the barrier before the launch's first iteration
    u32 me, n_pes, blocks;
    u32 warmup, least, repetitions;
};

namespace {

DEVICE u64 load_of(const u64* word) { return load_acquire_sys(word); }
DEVICE u64 load_of(const u32* word) { return load_acquire(word); }

// One thread. Waits until a word is at least `value`. False after a timeout of this or another block.
template <class Word> DEVICE bool probe_wait(const ProbeArea& a, const Word* word, u64 value, u32 what, u32 pe) {
    // If the other block itself waits for a peer, its timeout, which names that peer, should be reported first.
    const u64 start = nanoseconds(), limit = what == PROBE_OWN_BLOCK ? 2 * a.limit_ns : a.limit_ns;
    for (;;) {
        const u64 seen = load_of(word);
        if (seen >= value) return true;
        if (load_acquire(&a.control->failed)) return false;
        if (nanoseconds() - start > limit) {
            if (compare_swap(&a.control->failed, 0, 1)) {
                a.control->what = what;
                a.control->pe = pe;
                a.control->expected = value;
                a.control->seen = seen;
            }
            return false;
        }
        pause();
    }
}

// This block's part.
struct ProbePart { u64 from, bytes; };
DEVICE ProbePart part_of(u64 bytes) {
    const u64 each = ((bytes + blocks() - 1) / blocks() + 15) / 16 * 16, from = each * block();
    if (from >= bytes) return {0, 0};
    return {from, bytes - from < each ? bytes - from : each};
}

// All threads. Sends this block's part of message `number` to `to`, at `offset` in its receive buffer.
DEVICE void send_part(const ProbeArea& a, u32 to, u64 offset, u64 bytes, u64 number, bool last) {
    const ProbePart part = part_of(bytes);
    fence_sys();
    sync_block();
    if (part.bytes) put_block(a.received + offset + part.from, a.sent + part.from, part.bytes, to);
    sync_block();
    if (thread() != 0) return;
    if (part.bytes) fence_puts();
    fence_sys();
    signal_set(a.messages + a.me * a.blocks + block(), number << 1 | (last ? 1 : 0), to);
}

// All threads. Waits for this block's part of message `number` of `from`, copies it, and answers. False if it did not arrive.
DEVICE bool receive_part(const ProbeArea& a, u32 from, u64 offset, u64 bytes, u64 number, bool& last) {
    const u64* word = a.messages + from * a.blocks + block();
    bool arrived = true, ends = false;
    if (thread() == 0) {
        arrived = probe_wait(a, word, number << 1, PROBE_MESSAGE, from);
        ends = load_acquire_sys(word) & 1;
        acquire_puts(word);
    }
    if (sync_block_or(!arrived)) return false;
    last = sync_block_or(ends);
    const ProbePart part = part_of(bytes);
    const u8* source = a.received + offset + part.from;
    u8* to = a.taken + offset + part.from;
    const u64 whole = part.bytes / 16;
    for (u64 i = thread(); i < whole; i += threads()) store16(to + 16 * i, load16(source + 16 * i));
    for (u64 i = 16 * whole + thread(); i < part.bytes; i += threads()) to[i] = source[i];
    fence_sys();
    sync_block();
    if (thread() == 0) {
        fence_sys();
        signal_set(a.answers + a.me * a.blocks + block(), number, from);
    }
    return true;
}

// One thread. Waits for the answer to this block's part.
DEVICE bool answered(const ProbeArea& a, u32 to, u64 number) {
    return probe_wait(a, a.answers + to * a.blocks + block(), number, PROBE_ANSWER, to);
}

DEVICE u64* sent_number(const ProbeArea& a, u32 to) { return a.numbers + to * a.blocks + block(); }
DEVICE u64* received_number(const ProbeArea& a, u32 from) { return a.numbers + (a.n_pes + from) * a.blocks + block(); }

// One thread of block 0, at the end of a kernel. Stores the number of timed iterations, and the times that give the clock rate.
DEVICE void note_rate(const ProbeArea& a, u64 count, u64 ns, u64 first) {
    a.control->count = count;
    a.control->ns = nanoseconds() - ns;
    a.control->cycles = cycles() - first;
}

}  // namespace

// Sender of a pair: sends messages of `bytes` to `to` until `repetitions` are done after the warm-up, or until `least` are done and the
// time budget is used up.
KERNEL(aristos_probe_send, 1024, 1)(ProbeArea a, u32 to, u64 bytes) {
    const u64 ns = nanoseconds(), first = cycles();
    u64 number = *sent_number(a, to);
    sync_block();
    for (u32 iteration = 1;; iteration++) {
        const u32 before = iteration - 1;
        u64 begun = 0;
        bool ok = true, ends = false;
        if (thread() == 0) {
            if (block() == 0) {
                const bool enough = before >= a.warmup + a.least && nanoseconds() - ns > a.budget_ns;
                const bool last = enough || before >= a.warmup + a.repetitions;
                begun = cycles();
                store_release(&a.control->go, u64(iteration) << 1 | (last ? 1 : 0));
            }
            ok = probe_wait(a, &a.control->go, u64(iteration) << 1, PROBE_OWN_BLOCK, a.me);
            ends = load_acquire(&a.control->go) & 1;
        }
        if (sync_block_or(!ok)) return;
        const bool last = sync_block_or(ends);
        number++;
        send_part(a, to, 0, bytes, number, last);
        if (thread() == 0) {
            ok = answered(a, to, number);
            if (ok) fetch_add_acq_rel(&a.control->done, 1);
            if (ok && block() == 0) {
                ok = probe_wait(a, &a.control->done, u64(iteration) * blocks(), PROBE_OWN_BLOCK, a.me);
                if (!last && before >= a.warmup) a.cycles[before - a.warmup] = cycles() - begun;
                if (last) note_rate(a, before > a.warmup ? before - a.warmup : 0, ns, first);
            }
        }
        if (sync_block_or(!ok)) return;
        if (last) break;
    }
    if (thread() != 0) return;
    *sent_number(a, to) = number;
    quiet_puts();
}
REGISTER_KERNEL(aristos_probe_send)

// Receiver of a pair.
KERNEL(aristos_probe_answer, 1024, 1)(ProbeArea a, u32 from, u64 bytes) {
    u64 number = *received_number(a, from);
    sync_block();
    for (bool last = false; !last;) {
        number++;
        if (!receive_part(a, from, 0, bytes, number, last)) return;
    }
    if (thread() != 0) return;
    *received_number(a, from) = number;
    quiet_puts();
}
REGISTER_KERNEL(aristos_probe_answer)

// All PEs at once, `repetitions` times after a warm-up: each sends to the PEs that are `begin` to `end` - 1 positions after it, and
// receives from the PEs that are as many positions before it. Each iteration begins with a barrier of all PEs, so that they start at about
// the same time.
KERNEL(aristos_probe_together, 1024, 1)(ProbeArea a, u32 begin, u32 end, u64 bytes) {
    const u64 ns = nanoseconds(), first = cycles(), offset = (bytes + 63) / 64 * 64;
    const u32 me = a.me, n = a.n_pes, iterations = a.warmup + a.repetitions;
    for (u32 iteration = 1; iteration <= iterations; iteration++) {
        u64 begun = 0;
        bool ok = true, ends = false;
        if (block() == 0) {
            const u64 meeting = a.meeting + iteration - 1;
            sync_block();
            if (thread() == 0) {
                fence_puts();  // orders the previous barrier's signals: not all of their receivers have been waited for
                fence_sys();
                for (u32 k = 1; k < n; k++) signal_set(a.meetings + me, meeting, (me + k) % n);
            }
            for (u32 k = 1 + thread(); k < n && ok; k += threads()) {
                const u32 pe = (me + n - k) % n;
                ok = probe_wait(a, a.meetings + pe, meeting, PROBE_MEETING, pe);
            }
            if (sync_block_or(!ok)) return;
            if (thread() == 0) {
                begun = cycles();
                store_release(&a.control->go, iteration);
            }
        }
        if (thread() == 0) ok = probe_wait(a, &a.control->go, iteration, PROBE_OWN_BLOCK, me);
        if (sync_block_or(!ok)) return;
        for (u32 k = begin; k < end; k++) {
            const u32 to = (me + k) % n;
            send_part(a, to, me * offset, bytes, *sent_number(a, to) + 1, false);
        }
        for (u32 k = begin; k < end; k++) {
            const u32 from = (me + n - k) % n;
            if (!receive_part(a, from, from * offset, bytes, *received_number(a, from) + 1, ends)) return;
        }
        if (thread() == 0) {
            for (u32 k = begin; k < end && ok; k++) {
                const u32 to = (me + k) % n, from = (me + n - k) % n;
                ok = answered(a, to, *sent_number(a, to) + 1);
                *sent_number(a, to) += 1;
                *received_number(a, from) += 1;
            }
            if (ok) fetch_add_acq_rel(&a.control->done, 1);
            if (ok && block() == 0) {
                ok = probe_wait(a, &a.control->done, u64(iteration) * blocks(), PROBE_OWN_BLOCK, me);
                if (iteration > a.warmup) a.cycles[iteration - a.warmup - 1] = cycles() - begun;
                if (iteration == iterations) note_rate(a, a.repetitions, ns, first);
            }
        }
        if (sync_block_or(!ok)) return;
    }
    if (thread() == 0) quiet_puts();
}
REGISTER_KERNEL(aristos_probe_together)

// One block. Gathers `bytes` of every PE: from each PE's position in `taken` to the same position on all PEs.
KERNEL(aristos_probe_gather, 1024, 1)(ProbeArea a, u64 bytes) {
    const u32 me = a.me, n = a.n_pes;
    bool ok = true;
    for (u64 i = thread(); i < bytes; i += threads()) a.sent[i] = a.taken[me * bytes + i];
    fence_sys();
    sync_block();
    for (u32 k = 1; k < n; k++) put_block(a.received + me * bytes, a.sent, bytes, (me + k) % n);
    sync_block();
    if (thread() == 0) {
        fence_puts();
        fence_sys();
        for (u32 k = 1; k < n; k++) signal_set(a.meetings + me, a.meeting, (me + k) % n);
    }
    for (u32 k = 1 + thread(); k < n && ok; k += threads()) {
        const u32 pe = (me + n - k) % n;
        ok = probe_wait(a, a.meetings + pe, a.meeting, PROBE_MEETING, pe);
    }
    sync_block();
    if (thread() == 0) acquire_puts(a.meetings);
    sync_block();
    for (u64 i = thread(); i < n * bytes; i += threads())
        if (i / bytes != me) a.taken[i] = a.received[i];
    if (thread() == 0) quiet_puts();
}
REGISTER_KERNEL(aristos_probe_gather)

}  // namespace aristos
