// Fibers, their run queue, barriers and warp-wide exchanges: see simt.h.
#include "simt.h"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <cstdarg>
#include <cstdio>
#include <new>

#include "raw.h"
#include "switch.h"
#include "virtual_time.h"
#include "world.h"

asm(R"(
    .text
    .globl aristos_switch_stack
    .type aristos_switch_stack, @function
aristos_switch_stack:
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    ret
    .size aristos_switch_stack, . - aristos_switch_stack
)");

namespace aristos::dev {
__thread ThreadContext* current __attribute__((tls_model("initial-exec")));
const Registration* Registration::first = nullptr;
}  // namespace aristos::dev

namespace aristos::host {

namespace {

constexpr u64 STACK_CANARY = 0x5ca1ab1e0ddba11;
constexpr u64 SHARED_CANARY = 0xfee1deadfee1dead;
constexpr u64 WINDOW_BYTES = SHARED_START + MAX_SHARED + 64;
constexpr u32 ANYONE = ~0u;

const char* name_of(Wait wait) {
    switch (wait) {
        case Wait::NOTHING: return "nothing";
        case Wait::BLOCK: return "sync_block";
        case Wait::BLOCK_OR: return "sync_block_or";
        case Wait::NAMED: return "named_barrier";
        case Wait::WARP: return "sync_warp";
        case Wait::SHFL: return "shfl";
        case Wait::SHFL_XOR: return "shfl_xor";
        case Wait::SHFL_UP: return "shfl_up";
        case Wait::BALLOT: return "ballot";
        case Wait::LDMATRIX: return "ldmatrix_x4";
        case Wait::LDMATRIX_TRANS: return "ldmatrix_x4_trans";
        case Wait::STMATRIX: return "stmatrix_x4";
        case Wait::MMA_BF16: return "mma<Bf16>";
        case Wait::MMA_F16: return "mma<F16>";
        case Wait::MBARRIER: return "mbarrier_wait";
        case Wait::WGMMA: return "wgmma_wait";
        case Wait::PUT: return "a block-wide put";
        case Wait::CLUSTER: return "cluster_sync";
        case Wait::DONE: return "nothing: it has ended";
    }
    return "?";
}

char* map_memory(u64 bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(p);
}

}  // namespace

Block::Block() { window = map_memory(WINDOW_BYTES); }

Block::~Block() {
    for (auto& fiber : fibers) {
        if (fiber->tsan_fiber) tsan::destroy_fiber(fiber->tsan_fiber);
    }
    if (stacks) munmap(stacks, stack_count * STACK_BYTES);
    munmap(window, WINDOW_BYTES);
}

void Block::run(Grid* the_launch, u32 block_index) {
    launch = the_launch;
    index = block_index;
    threads = live = launch->threads;
    // In virtual time runs must be identical, whichever PE's launch is numbered first.
    const u64 number = launch->world->time ? 0 : launch->number;
    random = Random(world_seed(launch->world) + number * 1000003 + launch->pe * 10007 + index);
    if (stack_count < threads) {
        if (stacks) munmap(stacks, stack_count * STACK_BYTES);
        stacks = map_memory(threads * STACK_BYTES);
        stack_count = threads;
    }
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    warps.assign(threads / 32, Warp{});
    warpgroups.clear();
    warpgroups.resize((threads + WARPGROUP - 1) / WARPGROUP);
    for (Barrier& barrier : barriers) barrier = Barrier{};
    loads.clear();
    arrivals.clear();
    for (MbarrierSlot& slot : mbarriers) slot = {nullptr, 0};
    switches = pauses = idle_rounds = syncs = 0;
    queue_head = queue_size = 0;
    // Fills shared memory with all ones, which are NaN in every format, so that reads of uninitialised memory are noticed.
    raw_fill(window, 0xff, SHARED_START + launch->shared_bytes);
    raw_fill(written, 0, sizeof written);
    std::memcpy(window + SHARED_START + launch->shared_bytes, &SHARED_CANARY, 8);

    for (u32 i = 0; i < threads; ++i) start_fiber(fibers[i].get());
    cluster = launch->clusters ? &launch->clusters[index / 2] : nullptr;
    if (cluster) {
        Locked locked(cluster->lock);
        cluster->blocks[index % 2] = this;
    }
    if (launch->world->time) launch->world->time->begin(this);
    main_tsan_fiber = tsan::current_fiber();
    tsan::release(&sync_[0]);
    dev::ThreadContext* outside = dev::current;
    Fiber* to = pop();  // not pick(): after another block's failure it leaves through main_stack_pointer
    dev::current = to;
    tsan::switch_to(to->tsan_fiber);
    aristos_switch_stack(&main_stack_pointer, to->stack_pointer);
    dev::current = outside;
    tsan::acquire(&sync_[1]);

    if (cluster) {
        Locked locked(cluster->lock);
        cluster->over[index % 2] = true;
        if (!cluster->ops[index % 2].empty()) report_failure(launch, "block " + std::to_string(index) + " ends before the other block's operations in it");
    }
    if (launch->world->time) launch->world->time->end(this);
    if (launch->failed.load(std::memory_order_relaxed)) return;
    if (std::memcmp(window + SHARED_START + launch->shared_bytes, &SHARED_CANARY, 8) != 0) {
        report_failure(launch, "block " + std::to_string(index) + " wrote behind its " +
                                   std::to_string(launch->shared_bytes) + " bytes of shared memory");
    }
}

void Block::start_fiber(Fiber* fiber) {
    const u32 i = queue_size;
    fiber->thread = i;
    fiber->threads = threads;
    fiber->block = index;
    fiber->blocks = launch->grid;
    fiber->shared = window + SHARED_START;
    fiber->owner = this;
    fiber->wait = Wait::NOTHING;
    fiber->copy_groups = fiber->bulk_groups = fiber->fenced_at = 0;
    fiber->stores.clear();
    fiber->copies.clear();
    fiber->copies_issued = 0;
    for (u32 m = 0; m < MBARRIERS; ++m) fiber->waited[m] = fiber->fenced[m] = 0;
    fiber->unfenced.clear();
    fiber->wgmma = WgmmaThread{};
    if (!fiber->tsan_fiber) fiber->tsan_fiber = tsan::create_fiber();
    char* stack = stacks + i * STACK_BYTES;
    std::memcpy(stack, &STACK_CANARY, 8);
    // Staggers the stacks, because stacks at equal distances would share a few cache sets.
    fiber->stack_pointer = new_stack(stack + STACK_BYTES - (i % 32) * 320, fiber_main);
    queue[i] = u16(i);
    ++queue_size;
}

void Block::fiber_main() {
    Fiber* fiber = self();
    Block* block = fiber->owner;
    const Grid* launch = block->launch;
    tsan::acquire(&launch->sync[0]);
    tsan::acquire(&block->sync_[0]);  // the previous user of this stack
    launch->kernel->call(launch->kernel->erased, launch->args);
    block->fiber_over(fiber);
}

void Block::fiber_over(Fiber* fiber) {
    if (fiber->wgmma.borrowed != 0) fail("thread %u ends with a wgmma in flight", fiber->thread);
    check_no_stores(fiber);
    finish_copies(fiber, ~0u, true);
    u64 canary;
    std::memcpy(&canary, stacks + fiber->thread * STACK_BYTES, 8);
    if (canary != STACK_CANARY) fail("thread %u needs more than %llu bytes of stack", fiber->thread,
                                     static_cast<unsigned long long>(STACK_BYTES));
    tsan::release(&launch->sync[1]);
    tsan::release(&sync_[1]);
    fiber->wait = Wait::DONE;
    --live;
    // A block-wide barrier waits only for the remaining threads.
    Barrier& barrier = barriers[0];
    if (barrier.arrived != 0 && barrier.arrived == live) release_barrier(barrier, nullptr);
    switch_away(fiber);
    __builtin_unreachable();
}

void Block::leave() {
    void* nowhere;
    tsan::switch_to(main_tsan_fiber);
    aristos_switch_stack(&nowhere, main_stack_pointer);
    __builtin_unreachable();
}

void Block::fail(const char* format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    report_failure(launch, "block " + std::to_string(index) + ": " + text);
    leave();
}

void Block::check_shared(const void* p, u64 bytes, u32 alignment, const char* what) {
    const char* at = static_cast<const char*>(p);
    const char* start = window + SHARED_START;
    if (at < start || at + bytes > start + launch->shared_bytes) {
        fail("%s of thread %u is %lld bytes into shared memory of %u bytes, and takes %llu", what, self()->thread,
             static_cast<long long>(at - start), launch->shared_bytes, static_cast<unsigned long long>(bytes));
    }
    if (reinterpret_cast<std::uintptr_t>(at) % alignment != 0) {
        fail("%s of thread %u is not aligned to %u bytes", what, self()->thread, alignment);
    }
}

// The next fiber. Returns to run() if the launch has failed.
Fiber* Block::pick() {
    ++switches;
    if (launch->failed.load(std::memory_order_relaxed)) leave();
    if (cluster && cluster->waiting[index % 2].load(std::memory_order_acquire) != 0) run_remote_ops();
    if (copies_in_flight(*this) && switches >= next_load_due) complete_loads(*this, false);
    while (queue_size == 0) {
        if (live == 0) leave();
        if (copies_in_flight(*this)) {
            complete_loads(*this, true);
        } else if (!cluster || !await_remote_ops()) {
            report_failure(launch, deadlock());
            leave();
        }
    }
    if (queue_size > 1 && random.next() % 16 == 0) {
        const u16 later = queue[queue_head];
        queue_head = (queue_head + 1) % MAX_THREADS;
        queue[(queue_head + queue_size - 1) % MAX_THREADS] = later;
    }
    return pop();
}

Fiber* Block::pop() {
    Fiber* fiber = fibers[queue[queue_head]].get();
    queue_head = (queue_head + 1) % MAX_THREADS;
    --queue_size;
    return fiber;
}

void Block::switch_away(Fiber* from) {
    Fiber* to = pick();
    if (to == from) return;
    dev::current = to;
    tsan::switch_to(to->tsan_fiber);
    aristos_switch_stack(&from->stack_pointer, to->stack_pointer);
}

void Block::wait(Fiber* fiber, Wait kind, const void* on, u64 value) {
    fiber->wait = kind;
    fiber->wait_on = on;
    fiber->wait_value = value;
    switch_away(fiber);
}

void Block::wake(Fiber* fiber) {
    fiber->wait = Wait::NOTHING;
    queue[(queue_head + queue_size) % MAX_THREADS] = u16(fiber->thread);
    ++queue_size;
}

void Block::pause(Fiber* fiber) {
    wake(fiber);
    if (++pauses > queue_size) {  // every fiber has run, and some only poll
        pauses = 0;
        if (launch->world->time) {
            launch->world->time->poll(this);
            return switch_away(fiber);
        }
        poll_network(launch->world);
        // Sleeps longer the longer no progress is made, to leave the CPUs to other PEs.
        if (++idle_rounds < 32) {
            sched_yield();
        } else {
            const u64 doubled = idle_rounds / 16 - 2;
            const timespec nap{0, 20000L << (doubled < 5 ? doubled : 5)};
            nanosleep(&nap, nullptr);
        }
    }
    switch_away(fiber);
}

// ---- barriers

void Block::release_barrier(Barrier& barrier, Fiber* but) {
    barrier.any[barrier.phase % 2] = barrier.any_now;
    barrier.any_now = false;
    barrier.arrived = 0;
    if (barrier.kind == Wait::BLOCK || barrier.kind == Wait::BLOCK_OR) ++syncs;
    ++barrier.phase;
    const u32 start = random.below(threads);
    for (u32 i = 0; i < threads; ++i) {
        Fiber* fiber = fibers[(start + i) % threads].get();
        if (fiber != but && fiber->wait == barrier.kind && fiber->wait_on == &barrier) wake(fiber);
    }
}

void Block::arrive_at_barrier(Fiber* fiber, Barrier& barrier, u32 expected, Wait kind) {
    idle_rounds = 0;
    if (barrier.arrived == 0) {
        barrier.kind = kind;
        barrier.count = expected;
    } else if (barrier.kind != kind) {
        fail("thread %u is at %s where others are at %s", fiber->thread, name_of(kind), name_of(barrier.kind));
    } else if (barrier.count != expected && expected != ANYONE) {
        fail("thread %u is at named_barrier %lld with %u threads, others with %u", fiber->thread,
             static_cast<long long>(&barrier - barriers), expected, barrier.count);
    }
    const u8* sync = &barrier.sync[barrier.phase % 2];
    tsan::release(sync);
    if (++barrier.arrived == (expected == ANYONE ? live : expected)) {
        release_barrier(barrier, fiber);
    } else {
        wait(fiber, kind, &barrier, barrier.phase);
    }
    tsan::acquire(sync);
}

// ---- warps

bool Block::arrive_at_warp_op(Fiber* fiber, Wait instruction) {
    idle_rounds = 0;
    Warp& warp = warps[fiber->thread / 32];
    if (warp.arrived == 0) {
        warp.instruction = instruction;
    } else if (warp.instruction != instruction) {
        fail("warp %u has diverged: lane %u is at %s where others are at %s", fiber->thread / 32, fiber->thread % 32,
             name_of(instruction), name_of(warp.instruction));
    }
    if (++warp.arrived == 32) return true;
    wait(fiber, instruction);
    return false;
}

void Block::warp_done(Fiber* fiber) {
    const u32 first = fiber->thread / 32 * 32;
    warps[fiber->thread / 32].arrived = 0;
    for (u32 i = first; i < first + 32; ++i) {
        if (i != fiber->thread) wake(fibers[i].get());
    }
}

// ---- the report

std::string Block::deadlock() const {
    std::string text = "block " + std::to_string(index) + ": deadlock:";
    for (u32 i = 0; i < threads;) {
        u32 end = i + 1;
        const Fiber& f = *fibers[i];
        while (end < threads && fibers[end]->wait == f.wait &&
               (f.wait == Wait::DONE || (fibers[end]->wait_on == f.wait_on && fibers[end]->wait_value == f.wait_value))) {
            ++end;
        }
        char line[160];
        int n = snprintf(line, sizeof line, "%s threads %u to %u wait for %s", i == 0 ? "" : ";", i, end - 1, name_of(f.wait));
        if (f.wait == Wait::MBARRIER) {
            snprintf(line + n, sizeof line - n, " (at %lld in shared memory, parity %llu)",
                     static_cast<long long>(static_cast<const char*>(f.wait_on) - window - SHARED_START),
                     static_cast<unsigned long long>(f.wait_value));
        } else if (f.wait == Wait::NAMED || f.wait == Wait::BLOCK || f.wait == Wait::BLOCK_OR) {
            const Barrier* barrier = static_cast<const Barrier*>(f.wait_on);
            snprintf(line + n, sizeof line - n, " (barrier %lld, %u of %u have arrived)", static_cast<long long>(barrier - barriers),
                     barrier->arrived, barrier->count == ANYONE ? live : barrier->count);
        }
        text += line;
        i = end;
        if (text.size() > 1500) {
            text += "; and more";
            break;
        }
    }
    return text;
}

}  // namespace aristos::host

// ---- the primitives

namespace aristos::dev {

using host::Fiber;
using host::self;
using host::Wait;

void sync_block() {
    Fiber* fiber = self();
    fiber->owner->arrive_at_barrier(fiber, fiber->owner->barriers[0], ~0u, Wait::BLOCK);
}

u32 sync_block_or(bool v) {
    Fiber* fiber = self();
    host::Barrier& barrier = fiber->owner->barriers[0];
    const u32 phase = barrier.phase;
    barrier.any_now |= v;
    fiber->owner->arrive_at_barrier(fiber, barrier, ~0u, Wait::BLOCK_OR);
    return barrier.any[phase % 2];
}

void named_barrier(u32 id, u32 count) {
    Fiber* fiber = self();
    if (id < 1 || id > 15 || count == 0 || count % 32 != 0 || count > fiber->threads) {
        fiber->owner->fail("named_barrier(%u, %u) of %u threads cannot be", id, count, fiber->threads);
    }
    fiber->owner->arrive_at_barrier(fiber, fiber->owner->barriers[id], count, Wait::NAMED);
}

void sync_warp() {
    Fiber* fiber = self();
    host::Block* block = fiber->owner;
    host::Warp& warp = block->warps[fiber->thread / 32];
    const u8* sync = &warp.sync[warp.phase % 2];
    host::tsan::release(sync);
    if (block->arrive_at_warp_op(fiber, Wait::WARP)) {
        ++warp.phase;
        block->warp_done(fiber);
    }
    host::tsan::acquire(sync);
}

namespace {

// Lane i gets the value of lane `from(i, argument)`.
template <class From> u64 exchange(Wait kind, u64 value, u64 argument, From from) {
    Fiber* fiber = self();
    host::Block* block = fiber->owner;
    fiber->operands.value = value;
    fiber->operands.argument = argument;
    if (block->arrive_at_warp_op(fiber, kind)) {
        const std::unique_ptr<Fiber>* lanes = &block->fibers[fiber->thread / 32 * 32];
        for (u32 i = 0; i < 32; ++i) lanes[i]->result = lanes[from(i, lanes[i]->operands.argument)]->operands.value;
        block->warp_done(fiber);
    }
    return fiber->result;
}

}  // namespace

u64 exchange_shfl(u64 v, int from) {
    return exchange(Wait::SHFL, v, u64(from), [](u32, u64 a) { return u32(a) % 32; });
}
u64 exchange_xor(u64 v, int mask) {
    return exchange(Wait::SHFL_XOR, v, u64(mask), [](u32 lane, u64 a) { return (lane ^ u32(a)) % 32; });
}
u64 exchange_up(u64 v, u32 delta) {
    return exchange(Wait::SHFL_UP, v, delta, [](u32 lane, u64 a) { return a <= lane ? lane - u32(a) : lane; });
}

u32 ballot(bool v) {
    Fiber* fiber = self();
    host::Block* block = fiber->owner;
    fiber->operands.value = v;
    if (block->arrive_at_warp_op(fiber, Wait::BALLOT)) {
        const std::unique_ptr<Fiber>* lanes = &block->fibers[fiber->thread / 32 * 32];
        u64 bits = 0;
        for (u32 i = 0; i < 32; ++i) bits |= lanes[i]->operands.value << i;
        for (u32 i = 0; i < 32; ++i) lanes[i]->result = bits;
        block->warp_done(fiber);
    }
    return u32(fiber->result);
}

void pause() {
    Fiber* fiber = self();
    fiber->owner->pause(fiber);
}

u64 nanoseconds() {
    const host::Block* block = dev::current ? self()->owner : nullptr;
    if (block && block->launch->world->time) return block->time;
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return u64(t.tv_sec) * 1000000000 + u64(t.tv_nsec);
}

void fail_misaligned(const void* p) {
    self()->owner->fail("thread %u loads or stores 16 bytes at %p, which is not aligned to 16, or not in global memory", self()->thread, p);
}

#ifdef ARISTOS_TSAN
void fence_for_tsan() {
    static u8 all_fences;
    host::tsan::acquire(&all_fences);
    host::tsan::release(&all_fences);
}
#endif

}  // namespace aristos::dev
