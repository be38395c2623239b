// A CTA pair, i.e. a cluster of two blocks, in a persistent kernel. The pair computes GEMM tasks together (gemm_hopper_cta_pair.h); each
// block runs other items on its own.
//
// The first block finds the tasks. When it finds no other item, it *calls* the second block and enters the task loop. The second block runs
// other items meanwhile and follows into the loop when its current item is finished. Inside the loop only the first block's scheduler
// polls, for tasks and for other items. Both leave the loop together, for one of two reasons. If the first has found another item, it runs
// that item while the second looks for one of its own. If all items are claimed or the PE aborts, both finish the step.
//
// Neither block waits forever. Outside the loop the first waits only for the second to finish an item, which never blocks; the second polls
// for items while it waits for a call, and the first calls when it finds no item. Inside the loop the blocks wait only for each other's
// progress, except the first's scheduler, which waits with the usual time limit. Therefore a block that fails must not leave alone. The
// failed block continues, like a block that has not noticed the error, until the first block's scheduler makes both leave. The scheduler
// checks the abort word before anything else. The blocks agree explicitly on conditions that may look different to them (an abort, a
// barrier), so that both are always at the same step with the same items.
//
// schedule.h's proof still holds: a block that waits for the other holds no item, and one of the two always polls for the next item, or
// finishes one and then polls.
#pragma once
#include "tasks.h"

#if ARISTOS_HOPPER
namespace aristos {

// In shared memory, after the Block.
struct CtaPairState {
    u64 called;      // mbarrier of the second block: one phase per call
    u32 calls;       // calls that the second block has followed
    u32 agreements;  // number of completed agree() calls
    u32 ok[2];       // this block's value, for even and odd agreements
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
    // All threads of both blocks. Whether `ok` holds in both.
    static OUTLINE bool agree(Block& b, bool ok) {
        CtaPairState& p = of(b);
        dev::sync_block();
        // Two words, because the other block may still read one when the next is written.
        u32* mine = p.ok + p.agreements % 2;
        if (dev::thread() == 0) *mine = ok;
        dev::cluster_sync();
        const bool other = *dev::cluster_shared(mine, dev::cluster_rank() ^ 1) != 0;
        if (dev::thread() == 0) p.agreements++;
        return ok && other;
    }
    // All threads. Afterwards the other block does not access this one.
    static DEVICE void end(Block& b) {
        dev::cluster_sync();
        if (dev::thread() == 0) dev::mbarrier_inval(&of(b).called);
    }
    // All threads, before the task loop. The first block calls the second.
    static DEVICE void call(Block& b) {
        if (dev::thread() == 0 && !is_second()) dev::mbarrier_arrive_remote(&of(b).called, 1);
    }
    // One thread of the second block, while tasks are among the items: finds another item, or ITEM_TASKS once it is called.
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

// The scheduler of a CTA pair, used by both blocks. Inlined: a separate function would not know the producers' reduced register limit
// (setmaxnreg).
struct CtaPairScheduler {
    Block& b;
    // First block.
    template <class InProgress> DEVICE bool next(GemmTask& t, InProgress task_in_progress) {
        if (aborted(b.l)) {
            set_item(b, ITEM_NONE, 0);
            return false;
        }
        return Scheduler{b}.next(t, task_in_progress);
    }
    // Second block. The loop calls `await` while the first block has no next task, and `follow` once it has one (`more`) or its queue has
    // ended. Without a task, State::item becomes ITEM_NONE if the first block's item is ITEM_NONE. Otherwise it becomes ITEM_TASKS, so that
    // this block looks for an item.
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
