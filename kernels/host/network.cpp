// network.h says what it does.
#include "network.h"

#include <pthread.h>
#include <time.h>

#include "host.h"
#include "raw.h"

namespace aristos::host {

Network::Network(World& world, bool with_thread)
    : world_(world), random_(world.seed * 31 + 7), tsan_fiber_(tsan::create_fiber()) {
    // Without this thread a put that nobody polls for would never come. Where it cannot be started, whoever polls delivers.
    has_thread_ = with_thread && pthread_create(&thread_, nullptr, deliver_now_and_then, this) == 0;
}

Network::~Network() {
    over_ = true;
    if (has_thread_) pthread_join(thread_, nullptr);
    if (tsan_fiber_) tsan::destroy_fiber(tsan_fiber_);
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

void Network::put(u32 from, void* to, const void* source, u64 bytes, u64* signal, u64 value) {
    Locked locked(lock_);
    tsan::release(this);
    u32 number;
    if (free_puts_.empty()) {
        number = u32(puts_.size());
        puts_.push_back({});
    } else {
        number = free_puts_.back();
        free_puts_.pop_back();
    }
    if (world_.has_fault(from, ARISTOS_FAULT_SIGNAL_LOST)) signal = nullptr;
    puts_[number] = {from, 0, signal, value};
    if (signal && world_.has_fault(from, ARISTOS_FAULT_SIGNAL_FIRST)) {
        tsan::release(signal);
        __atomic_store_n(signal, value, __ATOMIC_RELEASE);
        puts_[number].signal = nullptr;
    }
    u64 done = 0;
    for (u32 left = 1 + random_.below(4); done < bytes; --left) {
        const u64 rest = bytes - done;
        // Cut at any multiple of 8 bytes, as hardware is likely to.
        u64 piece = left <= 1 || rest <= 8 ? rest : (random_.next() % rest + 7) / 8 * 8;
        if (piece == 0 || piece > rest) piece = rest;
        bag_.push_back({number, static_cast<char*>(to) + done, static_cast<const char*>(source) + done, piece, false});
        ++puts_[number].pieces;
        done += piece;
    }
    if (puts_[number].pieces == 0) add_signal(number);
    waiting_.store(bag_.size(), std::memory_order_relaxed);
}

void Network::add_signal(u32 number) {
    const Put& put = puts_[number];
    if (put.signal) {
        bag_.push_back({number, reinterpret_cast<char*>(put.signal), nullptr, 8, true});
    } else {
        free_puts_.push_back(number);
    }
}

void Network::deliver(std::size_t which) {
    const Piece piece = bag_[which];
    bag_[which] = bag_.back();
    bag_.pop_back();
    Put& put = puts_[piece.put];
    void* caller = tsan::current_fiber();
    if (caller) tsan::switch_to(tsan_fiber_);
    tsan::acquire(this);
    if (piece.is_signal) {
        tsan::release(put.signal);
        __atomic_store_n(put.signal, put.value, __ATOMIC_RELEASE);
        free_puts_.push_back(piece.put);
    } else {
        tsan::reads(piece.source, piece.bytes);
        tsan::writes(piece.to, piece.bytes);
        raw_copy(piece.to, piece.source, piece.bytes);
        if (--put.pieces == 0) add_signal(piece.put);
    }
    tsan::release(&delivered_);
    if (caller) tsan::switch_to(caller);
    waiting_.store(bag_.size(), std::memory_order_relaxed);
}

void Network::poll() {
    if (waiting_.load(std::memory_order_relaxed) == 0 || lock_.test_and_set(std::memory_order_acquire)) return;
    for (u32 n = random_.below(4); n > 0 && !bag_.empty(); --n) deliver(random_.below(u32(bag_.size())));
    lock_.clear(std::memory_order_release);
}

void Network::quiet(u32 from) {
    Locked locked(lock_);
    for (bool any = true; any;) {
        any = false;
        for (std::size_t i = bag_.size(); i-- > 0;) {
            if (puts_[bag_[i].put].from == from) {
                deliver(i);  // puts the last piece in its place, which has been seen, or a new signal at the end
                any = true;
            }
        }
    }
    // For the caller, what was delivered has completed: it may reuse its sources.
    tsan::acquire(&delivered_);
}

void poll_network(World* world) {
    if (world->network) world->network->poll();
}

}  // namespace aristos::host

namespace aristos::dev {

using namespace host;

namespace {

// The address at `pe` of the symmetric `mine`.
char* place_at(Block& block, const void* mine, u64 bytes, u32 pe, const char* what) {
    const World& world = *block.launch->world;
    const u64 offset = u64(static_cast<const char*>(mine) - world.heaps[block.launch->pe]);
    if (pe >= world.n_pes) block.fail("%s to PE %u of %u", what, pe, world.n_pes);
    if (offset > world.heap_bytes || bytes > world.heap_bytes - offset) {
        block.fail("%s of %llu bytes at %p, which is not in this PE's heap", what, static_cast<unsigned long long>(bytes), mine);
    }
    return world.heaps[pe] + offset;
}

// All threads of the block call it with the same arguments, and the last one to come does the work.
template <class Work> void once(Wait kind, const void* argument, Work work) {
    Fiber* fiber = self();
    Block& block = *fiber->home;
    Barrier& barrier = block.barriers[0];
    if (barrier.arrived == 0) {
        barrier.argument = argument;
    } else if (barrier.kind == kind && barrier.argument != argument) {
        block.fail("thread %u gives a block-wide put other arguments than the rest", fiber->thread);
    }
    if (barrier.arrived + 1 == block.live) {
        tsan::acquire(&barrier.sync[barrier.phase % 2]);
        work(block);
    }
    block.meet_block(fiber, barrier, ~0u, kind);
}

void put_from(Block& block, void* mine, const void* source, u64 bytes, u64* signal, u64 value, u32 pe) {
    World& world = *block.launch->world;
    char* to = place_at(block, mine, bytes, pe, "a put");
    u64* signal_to = signal ? reinterpret_cast<u64*>(place_at(block, signal, 8, pe, "a signal")) : nullptr;
    world.network->put(block.launch->pe, to, source, bytes, signal_to, value);
}

}  // namespace

void put_block(void* dst_mine, const void* src, u64 bytes, u32 pe) {
    once(Wait::PUT, dst_mine, [&](Block& block) { put_from(block, dst_mine, src, bytes, nullptr, 0, pe); });
}

void put_signal_block(void* dst_mine, const void* src, u64 bytes, u64* signal_mine, u64 value, u32 pe) {
    once(Wait::PUT, dst_mine, [&](Block& block) { put_from(block, dst_mine, src, bytes, signal_mine, value, pe); });
}

void signal_set(u64* signal_mine, u64 value, u32 pe) {
    put_from(*self()->home, signal_mine, nullptr, 0, signal_mine, value, pe);
}

void quiet_block() {
    once(Wait::QUIET, nullptr, [](Block& block) { block.launch->world->network->quiet(block.launch->pe); });
}

bool store_is_lost() {
    const Grid& launch = *self()->home->launch;
    return launch.world->has_fault(launch.pe, ARISTOS_FAULT_STORE_LOST);
}

}  // namespace aristos::dev
