#include "network.h"

#include <pthread.h>
#include <time.h>

#include "host.h"
#include "raw.h"
#include "virtual_time.h"

namespace aristos::host {

Network::Network(World& world, bool with_thread)
    : world_(world), random_(world.seed * 31 + 7), fences_(world.n_pes, 0), quiets_(world.n_pes, 0), tsan_fiber_(tsan::create_fiber()) {
    // Background delivery thread. If it cannot be started, puts are delivered by polling blocks.
    has_thread_ = with_thread && pthread_create(&thread_, nullptr, deliver_now_and_then, this) == 0;
}

Network::~Network() {
    over_ = true;
    if (has_thread_) pthread_join(thread_, nullptr);
    if (tsan_fiber_) tsan::destroy_fiber(tsan_fiber_);
    for (const Withheld& data : withheld_) Untracked<char>().deallocate(data.data, data.bytes);
}

void* Network::deliver_now_and_then(void* network) {
    Network* self = static_cast<Network*>(network);
    const timespec nap{0, 100000};
    while (!self->over_) {
        nanosleep(&nap, nullptr);
        self->poll();
    }
    return nullptr;
}

void Network::add(const Piece& piece) {
    bag_.push_back(piece);
    waiting_.store(bag_.size(), std::memory_order_relaxed);
}

void Network::put(u32 from, u32 to_pe, void* to, const void* source, u64 bytes) {
    Locked locked(lock_);
    tsan::release(this);
    u64 done = 0;
    for (u32 left = 1 + random_.below(4); done < bytes; --left) {
        const u64 rest = bytes - done;
        // Split at any multiple of 8 bytes, as hardware may do.
        u64 piece = left <= 1 || rest <= 8 ? rest : (random_.next() % rest + 7) / 8 * 8;
        if (piece == 0 || piece > rest) piece = rest;
        add({from, to_pe, fences_[from], static_cast<char*>(to) + done, static_cast<const char*>(source) + done, piece, 0});
        done += piece;
    }
}

void Network::signal(u32 from, u32 to_pe, u64* signal, u64 value) {
    Locked locked(lock_);
    tsan::release(this);
    if (world_.has_fault(from, ARISTOS_FAULT_SIGNAL_LOST)) return;
    if (world_.has_fault(from, ARISTOS_FAULT_SIGNAL_FIRST)) {
        tsan::release(signal);
        __atomic_store_n(signal, value, __ATOMIC_RELEASE);
        return;
    }
    add({from, to_pe, fences_[from], reinterpret_cast<char*>(signal), nullptr, 8, value});
}

void Network::fence(u32 from) {
    if (world_.has_fault(from, ARISTOS_FAULT_FENCE_LOST)) return;
    Locked locked(lock_);
    ++fences_[from];
}

bool Network::may_be_delivered(const Piece& piece) const {
    for (const Piece& other : bag_) {
        if (other.from == piece.from && other.to_pe == piece.to_pe && other.fences < piece.fences) return false;
    }
    return true;
}

void Network::deliver(std::size_t which) {
    const Piece piece = bag_[which];
    bag_[which] = bag_.back();
    bag_.pop_back();
    void* caller = tsan::current_fiber();
    if (caller) tsan::switch_to(tsan_fiber_);
    tsan::acquire(this);
    if (!piece.source) {
        tsan::release(piece.to);
        __atomic_store_n(reinterpret_cast<u64*>(piece.to), piece.value, __ATOMIC_RELEASE);
    } else {
        // For ThreadSanitizer data are written at delivery, whether or not they become visible at once.
        tsan::reads(piece.source, piece.bytes);
        tsan::writes(piece.to, piece.bytes);
        // Data for a peer in another process are not withheld: the peer has its own network, which could not publish them.
        if (!world_.owns_heaps || random_.below(2)) {
            raw_copy(piece.to, piece.source, piece.bytes);
        } else {
            char* data = Untracked<char>().allocate(piece.bytes);
            raw_copy(data, piece.source, piece.bytes);
            withheld_.push_back({piece.from, piece.to_pe, piece.to, piece.bytes, data});
        }
    }
    tsan::release(&delivered_);
    if (caller) tsan::switch_to(caller);
    waiting_.store(bag_.size(), std::memory_order_relaxed);
}

// Publishes the withheld data for which `of` holds, in delivery order.
template <class Of> void Network::show(Of of) {
    std::size_t kept = 0;
    for (const Withheld& data : withheld_) {
        if (!of(data)) {
            withheld_[kept++] = data;
            continue;
        }
        raw_copy(data.to, data.data, data.bytes);
        Untracked<char>().deallocate(data.data, data.bytes);
    }
    withheld_.resize(kept);
}

void Network::see(u32 pe) {
    Locked locked(lock_);
    show([&](const Withheld& data) { return data.to_pe == pe; });
}

void Network::poll() {
    if (waiting_.load(std::memory_order_relaxed) == 0 || lock_.test_and_set(std::memory_order_acquire)) return;
    for (u32 n = random_.below(4); n > 0 && !bag_.empty(); --n) {
        const u32 which = random_.below(u32(bag_.size()));
        if (may_be_delivered(bag_[which])) deliver(which);
    }
    lock_.clear(std::memory_order_release);
}

void Network::quiet(u32 from) {
    Locked locked(lock_);
    ++quiets_[from];
    for (bool any = true; any;) {
        any = false;
        for (std::size_t i = bag_.size(); i-- > 0;) {
            if (bag_[i].from != from) continue;
            any = true;
            if (may_be_delivered(bag_[i])) deliver(i);  // moves the last piece, which was already visited, to index i
        }
    }
    show([&](const Withheld& data) { return data.from == from; });
    // All deliveries have completed, so the caller may reuse its sources.
    tsan::acquire(&delivered_);
}

void poll_network(World* world) {
    if (world->network) world->network->poll();
}

}  // namespace aristos::host

namespace aristos::dev {

using namespace host;

namespace {

// Offset of the symmetric address `mine`, with `bytes` accessed at `pe`.
u64 offset_of(Block& block, const void* mine, u64 bytes, u32 pe, const char* what) {
    const World& world = *block.launch->world;
    const u64 offset = u64(static_cast<const char*>(mine) - world.heaps[block.launch->pe]);
    if (pe >= world.n_pes) block.fail("%s to PE %u of %u", what, pe, world.n_pes);
    if (offset > world.heap_bytes || bytes > world.heap_bytes - offset) {
        block.fail("%s of %llu bytes at %p, which is not in this PE's heap", what, static_cast<unsigned long long>(bytes), mine);
    }
    return offset;
}
// The address at `pe`, in a world whose heaps are all in this process.
char* address_at(const World& world, u64 offset, u32 pe) { return world.heaps[pe] + offset; }

// Calls a function of the inter-host transport; false if there is none.
template <class Call> bool through_transport(World& world, Call call) {
    if (!world.transport.put) return false;
    Locked locked(world.transport_lock);
    call(world.transport);
    return true;
}

// Called by all threads of the block with the same arguments; the last one to arrive does the work.
template <class Work> void once(Wait kind, const void* argument, Work work) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    Barrier& barrier = block.barriers[0];
    if (barrier.arrived == 0) {
        barrier.argument = argument;
    } else if (barrier.kind == kind && barrier.argument != argument) {
        block.fail("thread %u calls a block-wide put with different arguments", fiber->thread);
    }
    if (barrier.arrived + 1 == block.live) {
        tsan::acquire(&barrier.sync[barrier.phase % 2]);
        work(block);
    }
    block.arrive_at_barrier(fiber, barrier, ~0u, kind);
}

// Fails if the data before a put or signal are not fenced. The fence is necessary because no device thread performs the put. Either the
// data's writer calls fence_sys before the block's last barrier, or this thread does after it.
void check_fenced(Block& block, const Fiber& fiber, const char* what) {
    if (block.syncs - fiber.fenced_at > 1) block.fail("%s by thread %u, which has not called fence_sys", what, fiber.thread);
}

}  // namespace

void note_fence_sys() { self()->fenced_at = self()->owner->syncs; }

void put_block(void* dst_mine, const void* src, u64 bytes, u32 pe) {
    check_fenced(*self()->owner, *self(), "a put");
    once(Wait::PUT, dst_mine, [&](Block& block) {
        const Grid& launch = *block.launch;
        const u64 offset = offset_of(block, dst_mine, bytes, pe, "a put");
        if (const u64 ns = launch.world->slow_put_ns[launch.pe]) {
            const timespec nap{time_t(ns / 1000000000), long(ns % 1000000000)};
            nanosleep(&nap, nullptr);
        }
        if (through_transport(*launch.world, [&](auto& t) { t.put(t.context, pe, offset, src, bytes); })) return;
        char* to = address_at(*launch.world, offset, pe);
        if (VirtualTime* time = launch.world->time) {
            return time->send(&block, launch.pe, pe, bytes, false, [=] { raw_copy(to, src, bytes); });
        }
        launch.world->network->put(launch.pe, pe, to, src, bytes);
    });
}

void fence_puts() {
    const Grid& launch = *self()->owner->launch;
    if (through_transport(*launch.world, [](auto& t) { t.fence(t.context); })) return;
    if (launch.world->time) return;  // signals wait for earlier puts anyway
    launch.world->network->fence(launch.pe);
}

void signal_set(u64* signal_mine, u64 value, u32 pe) {
    Block& block = *self()->owner;
    check_fenced(block, *self(), "a signal");
    World& world = *block.launch->world;
    const u64 offset = offset_of(block, signal_mine, 8, pe, "a signal");
    if (through_transport(world, [&](auto& t) { t.signal(t.context, pe, offset, value); })) return;
    u64* to = reinterpret_cast<u64*>(address_at(world, offset, pe));
    if (VirtualTime* time = block.launch->world->time) {
        return time->send(&block, block.launch->pe, pe, 8, true, [=] { __atomic_store_n(to, value, __ATOMIC_RELEASE); });
    }
    block.launch->world->network->signal(block.launch->pe, pe, to, value);
}

void quiet_puts() {
    const Grid& launch = *self()->owner->launch;
    if (through_transport(*launch.world, [](auto& t) { t.quiet(t.context); })) return;
    if (VirtualTime* time = launch.world->time) return time->quiet(self()->owner, launch.pe);
    launch.world->network->quiet(launch.pe);
}

void acquire_puts(const u64* word_mine) {
    Block& block = *self()->owner;
    (void)offset_of(block, word_mine, 8, block.launch->pe, "a test");
    if (Network* network = block.launch->world->network.get()) network->see(block.launch->pe);
}

u32 my_pe() { return self()->owner->launch->pe; }
u32 n_pes() { return self()->owner->launch->world->n_pes; }

bool store_is_lost() {
    const Grid& launch = *self()->owner->launch;
    return launch.world->has_fault(launch.pe, ARISTOS_FAULT_STORE_LOST);
}

// With the fault SLOW_SIGNALLER: sleeps in one of four calls, so that other blocks run before this block's other threads continue.
void delay_signaller() {
    Block& block = *self()->owner;
    if (!block.launch->world->has_fault(block.launch->pe, ARISTOS_FAULT_SLOW_SIGNALLER) || block.random.below(4) != 0) return;
    const timespec nap{0, 200'000};
    nanosleep(&nap, nullptr);
}

}  // namespace aristos::dev
