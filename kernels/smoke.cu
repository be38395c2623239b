// The communication primitives that the layer's kernels need, alone: a block-wide put to every PE, a fence, and signals. Multi-PE jobs
// run this before anything larger (src/gpu/smoke.rs).
#include "platform.h"

namespace aristos {
using namespace dev;

// Symmetric, except `words`.
struct SmokeArea {
    u64* signals;     // [n_pes], zero
    u64* sent;        // [words]
    u64* received;    // [n_pes][words]
    u64 words;
};
// Output: this PE's number and the number of PEs; a PE whose signal is missing, and a PE with a wrong word (~0: none).
struct SmokeResult {
    u64 my_pe, n_pes, missing_pe, wrong_pe, wrong_word, seen;
};

// Word `i` sent by `pe`: all words differ and none is 0 (splitmix64's finalizer, a bijection).
DEVICE u64 smoke_word(u64 pe, u64 i) {
    u64 z = (pe + 1) << 40 | (i + 1);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// One block. Every PE puts to all others, even to those reachable by stores, and waits at most `limit_ns` for them.
KERNEL(aristos_smoke, 128, 1)(SmokeArea area, SmokeResult* result, u64 value, u64 limit_ns) {
    const u32 me = my_pe(), n = n_pes();
    if (thread() == 0) *result = {me, n, ~u64(0), ~u64(0), 0, 0};
    for (u64 i = thread(); i < area.words; i += threads()) area.sent[i] = smoke_word(me, i);
    fence_sys();
    sync_block();
    for (u32 k = 1; k < n; k++) put_block(area.received + me * area.words, area.sent, area.words * sizeof(u64), (me + k) % n);
    sync_block();
    if (thread() == 0) {
        fence_puts();
        fence_sys();
        for (u32 k = 1; k < n; k++) signal_set(area.signals + me, value, (me + k) % n);
    }
    const u64 start = nanoseconds();
    for (u32 pe = thread(); pe < n; pe += threads()) {
        bool arrived = pe == me;
        while (!arrived && !(arrived = load_acquire_sys(area.signals + pe) == value) && nanoseconds() - start < limit_ns) pause();
        if (!arrived) result->missing_pe = pe;
    }
    sync_block();
    if (thread() == 0) acquire_puts(area.signals);
    sync_block();
    for (u32 k = 1; k < n; k++) {
        const u32 pe = (me + k) % n;
        for (u64 i = thread(); i < area.words; i += threads()) {
            const u64 seen = load_relaxed(area.received + pe * area.words + i);
            if (seen == smoke_word(pe, i)) continue;
            result->wrong_pe = pe;  // any of them
            result->wrong_word = i;
            result->seen = seen;
        }
    }
    if (thread() == 0) quiet_puts();
}
REGISTER_KERNEL(aristos_smoke)

}  // namespace aristos
