// Clusters of two blocks. Each block is an OS thread, which accesses the other's shared memory only to load and to add to words. Other
// remote operations (arrivals and TMA loads) are queued for the other block, which runs them when it switches between its fibers.
#include <sched.h>

#include "simt.h"
#include "virtual_time.h"
#include "world.h"

namespace aristos::host {

namespace {

Cluster& cluster_of(Block& block) {
    if (!block.cluster) block.fail("thread %u is not in a cluster", self()->thread);
    return *block.cluster;
}

void post_remote_op(Block& from, u32 rank, const RemoteOp& op) {
    Cluster& cluster = *from.cluster;
    bool over;
    {
        Locked locked(cluster.lock);
        tsan::release(&cluster.sync[0]);
        over = cluster.over[rank];
        if (!over) {
            cluster.ops[rank].push_back(op);
            cluster.waiting[rank].store(u32(cluster.ops[rank].size()), std::memory_order_release);
        }
    }
    if (over) from.fail("thread %u accesses block %u of its cluster, which is not running", self()->thread, rank);
    VirtualTime* time = from.launch->world->time;
    if (time && rank != from.index % 2) time->wake(cluster.blocks[rank], time->now(&from));
}

template <class P> P* in_block(const Block& from, const Block& to, P* p) {
    return reinterpret_cast<P*>(to.window + from.shared_address(p));
}

// Block `rank`, which must be running: kernels call cluster_sync first.
Block& block_of(Block& from, u32 rank) {
    Cluster& cluster = cluster_of(from);
    if (rank > 1) from.fail("block %u of a cluster of two", rank);
    Block* to;
    {
        Locked locked(cluster.lock);
        to = cluster.over[rank] ? nullptr : cluster.blocks[rank];
    }
    if (!to) from.fail("thread %u accesses block %u of its cluster, which is not running", self()->thread, rank);
    return *to;
}

}  // namespace

void Block::run_remote_ops() {
    const u32 rank = index % 2;
    UntrackedVector<RemoteOp> ops;
    {
        Locked locked(cluster->lock);
        ops.swap(cluster->ops[rank]);
        cluster->waiting[rank].store(0, std::memory_order_relaxed);
        cluster->idle[rank] = false;
    }
    tsan::acquire(&cluster->sync[0]);
    for (const RemoteOp& op : ops) {
        switch (op.what) {
            case RemoteKind::ARRIVE: arrive_here(*this, op.bar); break;
            case RemoteKind::LOAD: begin_load(*this, op.load, true); break;
            case RemoteKind::FENCE: pass_fenced(*this); break;
            case RemoteKind::BARRIER:
                for (auto& fiber : fibers) {
                    if (fiber->wait == Wait::CLUSTER) wake(fiber.get());
                }
        }
    }
}

bool Block::await_remote_ops() {
    const u32 rank = index % 2;
    for (;;) {
        if (cluster->waiting[rank].load(std::memory_order_acquire) != 0) return run_remote_ops(), true;
        if (VirtualTime* time = launch->world->time) {
            if (launch->failed.load(std::memory_order_relaxed) || !time->park(this)) return false;
            continue;
        }
        {
            Locked locked(cluster->lock);
            cluster->idle[rank] = true;
            const bool other = cluster->over[1 - rank] || (cluster->idle[1 - rank] && cluster->ops[1 - rank].empty());
            if (other && cluster->ops[rank].empty()) return false;
        }
        if (launch->failed.load(std::memory_order_relaxed)) return false;
        sched_yield();
    }
}

}  // namespace aristos::host

namespace aristos::dev {

using namespace host;

u32 cluster_rank() {
    Block& block = *self()->owner;
    cluster_of(block);
    return block.index % 2;
}

void cluster_sync() {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    Cluster& cluster = cluster_of(block);
    tsan::release(&cluster.sync[1]);
    bool last;
    {
        Locked locked(cluster.lock);
        last = ++cluster.arrived == 2 * block.threads;
        if (last) cluster.arrived = 0;
    }
    if (last) {
        for (u32 rank = 0; rank < 2; ++rank) post_remote_op(block, rank, {RemoteKind::BARRIER, nullptr, {}});
    }
    block.wait(fiber, Wait::CLUSTER);
    tsan::acquire(&cluster.sync[1]);
}

const void* cluster_address(const void* p, u32 rank) {
    Block& block = *self()->owner;
    block.check_shared(p, 1, 1, "cluster_shared's address");
    return in_block(block, block_of(block, rank), p);
}

void mbarrier_arrive_remote(u64* bar, u32 rank) {
    Block& block = *self()->owner;
    block.check_shared(bar, 8, 8, "mbarrier_arrive_at");
    Block& to = block_of(block, rank);
    if (&to == &block) return arrive_here(block, bar);
    post_remote_op(block, rank, {RemoteKind::ARRIVE, in_block(block, to, bar), {}});
}

void fence_proxy_async_cluster() {
    Block& block = *self()->owner;
    const u32 rank = 1 - cluster_rank();
    block_of(block, rank);
    post_remote_op(block, rank, {RemoteKind::FENCE, nullptr, {}});
}

void tma_load_3d_multicast(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, i32 item) {
    Block& block = *self()->owner;
    const TmaLoad load = checked_load(smem, map, bar, col, row, &item);
    begin_load(block, load);
    const u32 rank = 1 - cluster_rank();
    const Block& to = block_of(block, rank);
    RemoteOp op{RemoteKind::LOAD, nullptr, load};
    op.load.to = in_block(block, to, load.to);
    op.load.bar = in_block(block, to, load.bar);
    post_remote_op(block, rank, op);
}

}  // namespace aristos::dev
