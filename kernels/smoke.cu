// What the layer's kernels need of what joins the PEs, and nothing else: a block of bytes put to every PE, a fence, and signals. Several PEs
// try it before anything larger (src/gpu/smoke.rs).
#include "platform.h"

namespace aristos {
using namespace dev;

// Symmetric, but for the numbers.
struct SmokeArea {
    u64* signals;     // [n_pes], zero
    u64* sent;        // [words]
    u64* received;    // [n_pes][words]
    u64 words;
};
// What the kernel leaves: its numbers of this PE and of PEs; a PE whose signal did not come, and one of whose words one is wrong, or ~0.
struct SmokeResult {
    u64 my_pe, n_pes, missing_pe, wrong_pe, wrong_word, seen;
};

// Word `i` of what `pe` sends: no two alike, none 0 (splitmix64's finalizer, a bijection).
DEVICE u64 smoke_word(u64 pe, u64 i) {
    u64 z = (pe + 1) << 40 | (i + 1);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// One block. All PEs put to all others, even those whose memory takes stores, and wait for them, at most `limit_ns`.
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
