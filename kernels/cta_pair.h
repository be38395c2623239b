// A pair of blocks, a cluster of two, in a persistent kernel: it does GEMM tasks together (gemm_hopper_cta_pair.h), and each of the two other items by itself.
//
// Tasks are the first block's to find. When it finds no other item it *calls* the second, and goes into the loop of tasks; the second, which takes other items
// meanwhile, goes into it as well once it has ended the one it has. In the loop only the first block's scheduler looks, for tasks and for other items. It leaves
// the loop, and the second with it, either for an item, which the first then does while the second looks for one of its own, or because all items are taken or the
// PE aborts: then both end the step's items.
//
// Why neither waits for ever. Outside the loop the first waits for the second to end an item, which never waits; the second waits for a call, and looks for items
// meanwhile: the first has an item, and calls when it finds no other. In the loop each completes what the other waits for there, and only the first's scheduler waits for
// more, with the limit of all waits. So a block that fails must not leave: it goes on, as blocks do that have not noticed, until the first's scheduler, which
// looks at the abort word before all else, has both leave. What may look different to the two, whether the PE aborts or a barrier was passed, they agree on,
// so that they are at the same step at any time, and have the same items to take.
//
// Nor does schedule.h's argument change: a block that waits for the other holds no item, and of a pair one always looks for the next, or ends one and then looks.
#pragma once
#include "tasks.h"

#if ARISTOS_HOPPER
namespace aristos {

// In shared memory, behind the Block.
struct CtaPairState {
    u64 called;      // mbarrier of the second block: a phase for each call
    u32 calls;       // that the second block has followed
    u32 agreements;  // so far
    u32 ok[2];       // this block's, of even and odd agreements
};
static_assert(sizeof(State) + sizeof(Block) + sizeof(CtaPairState) <= STATE_BYTES && sizeof(Block) % alignof(CtaPairState) == 0, "state");

struct CtaPair {
    static DEVICE CtaPairState& of(Block& b) { return *reinterpret_cast<CtaPairState*>(&b + 1); }
    static DEVICE bool is_second() { return dev::cluster_rank() == 1; }

    // One thread, before the first `agree`.
    static DEVICE void begin(Block& b) {
        CtaPairState& p = of(b);
        dev::mbarrier_init(&p.called, 1);
        dev::mbarrier_fence_init();
        p.calls = p.agreements = 0;
        b.state.is_second_cta = is_second();
    }
    // All threads: whether it is so for both, to be asked by both. Meets the other block.
    static OUTLINE bool agree(Block& b, bool ok) {
        CtaPairState& p = of(b);
        dev::sync_block();
        // Two words, as the other block may still read one when the next is written.
        u32* mine = p.ok + p.agreements % 2;
        if (dev::thread() == 0) *mine = ok;
        dev::cluster_sync();
        const bool other = *dev::cluster_shared(mine, dev::cluster_rank() ^ 1) != 0;
        if (dev::thread() == 0) p.agreements++;
        return ok && other;
    }
    // All threads: from here on the other block reaches for nothing here.
    static DEVICE void end(Block& b) {
        dev::cluster_sync();
        if (dev::thread() == 0) dev::mbarrier_inval(&of(b).called);
    }
    // All threads, before the loop of tasks.
    static DEVICE void call(Block& b) {
        if (dev::thread() == 0 && !is_second()) dev::mbarrier_arrive_remote(&of(b).called, 1);
    }
    // One thread of the second block, where tasks are among the items: another item, or ITEM_TASKS once it is called.
    static OUTLINE void next_item(Block& b) {
        enter_now(b.l, b.pass, b.state, PHASE_WAITING);
        CtaPairState& p = of(b);
        while (!dev::mbarrier_test(&p.called, p.calls & 1)) {
            if (find_item(b, b.items) || find_background_item(b)) return;
            dev::pause();
        }
        p.calls++;
        set_item(b, ITEM_TASKS, 0);
    }
};

// The scheduler of a pair, in both blocks. Inlined: a separate function would not know how few registers setmaxnreg left the producers.
struct CtaPairScheduler {
    Block& b;
    // The first block's.
    template <class InProgress> DEVICE bool next(GemmTask& t, InProgress task_in_progress) {
        if (aborted(b.l)) {
            set_item(b, ITEM_NONE, 0);
            return false;
        }
        return Scheduler{b}.next(t, task_in_progress);
    }
    // The second's: before and after the first has the next task. Without one, what is to be done now: ITEM_TASKS, to look for an item, or what the first has.
    DEVICE void await() { enter_now(b.l, b.pass, b.state, PHASE_WAITING); }
    DEVICE void follow(bool more) {
        if (more) return enter_now(b.l, b.pass, b.state, PHASE_EXPERT);
        const bool none = *dev::cluster_shared(&b.state.item.kind, 0) == ITEM_NONE;
        set_item(b, none ? ITEM_NONE : ITEM_TASKS, 0);
    }
    DEVICE DoneCounters done_counters(const GemmTask& t) { return Scheduler{b}.done_counters(t); }
};

}  // namespace aristos
#endif
