// cp.async, mbarriers and TMA. Copies complete late. A cp.async completes at the wait that covers it. TMA loads, and cp.async that an
// mbarrier counts, complete after a seeded number of switches between fibers.
#include <algorithm>

#include "fragments.h"
#include "raw.h"
#include "simt.h"

namespace aristos::host {

namespace {

// The 8 bytes of an mbarrier. Transaction bytes are counted in units of 16.
using i16 = std::int16_t;
struct Mbarrier { u16 tag, count, pending; i16 transactions; };
static_assert(sizeof(Mbarrier) == 8);
constexpr u16 MBARRIER_TAG = 0xb4a0;  // the lowest bit is the phase

Mbarrier* checked(Block& block, u64* bar, const char* what) {
    block.check_shared(bar, 8, 8, what);
    Mbarrier* mbarrier = reinterpret_cast<Mbarrier*>(bar);
    if ((mbarrier->tag & ~1) != MBARRIER_TAG) block.fail("%s of thread %u: it is not initialised", what, self()->thread);
    return mbarrier;
}

u8 slot_of(const Block& block, const u64* bar) {
    u8 slot = 0;
    while (block.mbarriers[slot].bar != bar) ++slot;  // found, because `bar` is `checked`
    return slot;
}

// Completes the current phase if no arrival and no byte is missing.
void settle(Block& block, Mbarrier* mbarrier) {
    if (mbarrier->pending != 0 || mbarrier->transactions != 0) return;
    mbarrier->tag ^= 1;
    ++block.mbarriers[slot_of(block, reinterpret_cast<u64*>(mbarrier))].phases;
    mbarrier->pending = mbarrier->count;
    block.idle_rounds = 0;
    for (u32 i = 0; i < block.threads; ++i) {
        Fiber* fiber = block.fibers[i].get();
        if (fiber->wait == Wait::MBARRIER && fiber->wait_on == mbarrier) block.wake(fiber);
    }
}

// The address that represents a phase of `bar` to ThreadSanitizer: one for each parity.
const void* sync_of(const void* bar, u32 parity) { return static_cast<const char*>(bar) + 4 * (parity & 1); }

void complete(Block& block, const TmaLoad& load) {
    Map map;
    std::memcpy(&map, load.map, sizeof map);
    const u32 pieces = map.box_cols * map.element_bytes / 16;  // per row
    const u32 per_piece = 16 / map.element_bytes;
    const bool has_item = load.item >= 0 && u32(load.item) < (map.items ? map.items : 1);
    const char* base = reinterpret_cast<const char*>(map.base) + load.item * map.item_stride_bytes;
    for (u32 r = 0; r < map.box_rows; ++r) {
        for (u32 p = 0; p < pieces; ++p) {
            const u32 plain = block.shared_address(load.to) + (r * pieces + p) * 16;
            char* to = block.window + swizzled_128b(plain);
            block.written[block.shared_address(to) / 16] = {};
            for (u32 e = 0; e < per_piece; ++e) {
                const long long row = load.row + static_cast<long long>(r);
                const long long col = load.col + static_cast<long long>(p * per_piece + e);
                const bool inside = has_item && row >= 0 && row < map.rows && col >= 0 && col < map.cols;
                char* element = to + e * map.element_bytes;
                for (u32 b = 0; b < map.element_bytes; ++b) {
                    element[b] = inside ? base[row * map.row_stride_bytes + col * map.element_bytes + b] : 0;
                }
            }
        }
    }
    Mbarrier* mbarrier = reinterpret_cast<Mbarrier*>(load.bar);
    mbarrier->transactions = i16(mbarrier->transactions - i16(map.box_rows * pieces));
    settle(block, mbarrier);
}

bool later(const AsyncArrival& a, const AsyncArrival& b) { return a.due > b.due; }

// Completes a copy of `fiber`.
void land(Fiber* fiber, const Copy& copy) {
    const Vec16 zeros{};
    Written& written = fiber->owner->written[fiber->owner->shared_address(copy.to) / 16];
    written = {u16(fiber->thread + 1), copy.slot, false, false, copy.phase};
    __builtin_memcpy(copy.to, copy.valid ? copy.from : reinterpret_cast<const char*>(&zeros), 16);
}

void complete(Block& block, const AsyncArrival& arrival) {
    Fiber* fiber = arrival.fiber;
    std::size_t kept = 0;
    for (const Copy& copy : fiber->copies) {
        if (copy.number < arrival.through) land(fiber, copy);
        else fiber->copies[kept++] = copy;
    }
    fiber->copies.resize(kept);
    Mbarrier* mbarrier = reinterpret_cast<Mbarrier*>(arrival.bar);
    if (mbarrier->pending == 0) block.fail("cp.async of thread %u arrive at an mbarrier where all had arrived", fiber->thread);
    --mbarrier->pending;
    settle(block, mbarrier);
}

void arrive(Block& block, u64* bar, u32 count, u32 bytes) {
    Mbarrier* mbarrier = checked(block, bar, "mbarrier_arrive");
    const u32 pieces = bytes / 16;
    if (bytes % 16 != 0 || mbarrier->transactions + i32(pieces) > 32767) block.fail("an mbarrier is to expect %u bytes", bytes);
    if (count == 0 || mbarrier->pending < count) block.fail("thread %u arrives at an mbarrier where all had arrived", self()->thread);
    tsan::release(sync_of(bar, mbarrier->tag));
    mbarrier->transactions = i16(mbarrier->transactions + i32(pieces));
    mbarrier->pending = u16(mbarrier->pending - count);
    settle(block, mbarrier);
}

}  // namespace

Map read_map(const TensorMap* map, const char* what) {
    Map read;
    std::memcpy(&read, map, sizeof read);
    if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0 || read.magic != MAP_MAGIC) {
        self()->owner->fail("thread %u %s through memory that is not a tensor map", self()->thread, what);
    }
    return read;
}

void complete_loads(Block& block, bool force_one) {
    std::size_t earliest = 0;
    for (std::size_t i = 1; i < block.loads.size(); ++i) {
        if (block.loads[i].due < block.loads[earliest].due) earliest = i;
    }
    if (force_one) {
        if (block.arrivals.empty() || (!block.loads.empty() && block.loads[earliest].due < block.arrivals[0].due)) block.loads[earliest].due = 0;
        else block.arrivals[0].due = 0;
    }
    while (!block.arrivals.empty() && block.arrivals[0].due <= block.switches) {
        const AsyncArrival arrival = block.arrivals[0];
        std::pop_heap(block.arrivals.begin(), block.arrivals.end(), later);
        block.arrivals.pop_back();
        complete(block, arrival);
    }
    for (std::size_t i = 0; i < block.loads.size();) {
        if (block.loads[i].due <= block.switches) {
            const TmaLoad load = block.loads[i];
            block.loads[i] = block.loads.back();
            block.loads.pop_back();
            complete(block, load);
        } else {
            ++i;
        }
    }
    block.next_load_due = block.arrivals.empty() ? ~u64(0) : block.arrivals[0].due;
    for (const TmaLoad& load : block.loads) {
        if (load.due < block.next_load_due) block.next_load_due = load.due;
    }
}

TmaLoad checked_load(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, const i32* item) {
    Block& block = *self()->owner;
    const Map read = read_map(map, "loads");
    if ((item != nullptr) != (read.items != 0)) block.fail("thread %u loads with %u coordinates through a map of %u dimensions", self()->thread, item ? 3 : 2, read.items ? 3 : 2);
    block.check_shared(smem, read.box_rows * read.box_cols * read.element_bytes, 128, "tma_load_2d's target");
    checked(block, bar, "tma_load_2d's mbarrier");
    TmaLoad load{static_cast<char*>(smem), bar, {}, col, row, item ? *item : 0, 0};
    std::memcpy(load.map, map, sizeof load.map);
    return load;
}

// Whether some thread has waited for the copy and then issued a fence. The thread may not have read the copy, as in tiles with fewer rows
// than two panels.
bool fenced_by_any(const Block& block, const Written& written) {
    if (written.seen) return true;
    for (const auto& fiber : block.fibers) {
        if (written.slot != NO_SLOT && fiber->fenced[written.slot] >= written.phase) return true;
    }
    return false;
}

void pass_fenced(Block& block) {
    for (Written& written : block.written) {
        if (written.thread != 0 && fenced_by_any(block, written)) written.passed = true;
    }
}

void begin_load(Block& block, TmaLoad load, bool remote) {
    Map map;
    std::memcpy(&map, load.map, sizeof map);
    const u32 bytes = map.box_rows * map.box_cols * map.element_bytes;
    checked(block, load.bar, "tma_load_2d's mbarrier");
    for (u32 piece = block.shared_address(load.to) / 16, end = piece + bytes / 16; piece < end; ++piece) {
        const Written& written = block.written[piece];
        if (written.thread == 0) continue;
        if (!fenced_by_any(block, written)) {
            block.fail("tma_load_2d overwrites data of thread %u, without fence_proxy_async in between", written.thread - 1);
        }
        if (remote && !written.passed) {
            block.fail("tma_load_2d_both overwrites data of thread %u, without fence_proxy_async_cluster in between", written.thread - 1);
        }
    }
    // From now on the target may be written at any time.
    if (block.random.next() % 2 == 0) raw_fill(load.to, 0xff, bytes);
    load.due = block.switches + 1 + block.random.below(4 * block.threads);
    if (!copies_in_flight(block) || load.due < block.next_load_due) block.next_load_due = load.due;
    block.loads.push_back(load);
}

void arrive_here(Block& block, u64* bar) { arrive(block, bar, 1, 0); }

void finish_copies(Fiber* fiber, u32 through_group, bool uncommitted_too) {
    std::size_t kept = 0;
    for (Copy& copy : fiber->copies) {
        const bool covered = copy.group < fiber->copy_groups ? copy.group < through_group : uncommitted_too;
        if (!covered) {
            fiber->copies[kept++] = copy;
            continue;
        }
        if (copy.valid) tsan::reads(copy.from, 16);
        tsan::writes(copy.to, 16);
        fiber->unfenced.push_back(fiber->owner->shared_address(copy.to) / 16);
        land(fiber, copy);
    }
    fiber->copies.resize(kept);
}

int make_tensor_map(void* out, u64 base, u32 rows, u32 cols, u64 row_stride_bytes, u32 items, u64 item_stride_bytes, u32 box_rows,
                    u32 box_cols, u32 element_bytes) {
    // The conditions of cuTensorMapEncodeTiled; a box's rows must be whole 128-byte lines, as this swizzle assumes.
    if (base % 16 != 0 || row_stride_bytes % 16 != 0 || row_stride_bytes >= u64(1) << 40) return 1;
    if (items && (item_stride_bytes % 16 != 0 || item_stride_bytes >= u64(1) << 40)) return 1;
    if (rows == 0 || cols == 0 || box_rows == 0 || box_rows > 256 || box_cols > 256) return 1;
    if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4 && element_bytes != 8) return 1;
    if (box_cols * element_bytes != 128) return 1;
    const Map map{MAP_MAGIC, base, row_stride_bytes, item_stride_bytes, rows, cols, box_rows, box_cols, element_bytes, items};
    std::memset(out, 0, sizeof(TensorMap));
    std::memcpy(out, &map, sizeof map);
    return 0;
}

}  // namespace aristos::host

namespace aristos::dev {

using namespace host;

void cp_async16(void* smem, const void* global, bool valid) {
    Fiber* fiber = self();
    work.copies.fetch_add(1, std::memory_order_relaxed);
    fiber->owner->check_shared(smem, 16, 16, "cp_async16's target");
    if (valid && reinterpret_cast<std::uintptr_t>(global) % 16 != 0) fail_misaligned(global);
    fiber->copies.push_back(
        {static_cast<char*>(smem), static_cast<const char*>(global), fiber->copy_groups, valid, NO_SLOT, fiber->copies_issued++, 0});
    // From now on the target may be written at any time; its contents are undefined until the copy completes.
    if (fiber->owner->random.next() % 2 == 0) raw_fill(smem, 0xff, 16);
}

void cp_async_commit() {
    Fiber* fiber = self();
    ++fiber->copy_groups;
    if (fiber->owner->random.next() % 8 == 0) finish_copies(fiber, fiber->copy_groups, false);
}

void cp_async_wait_group(u32 n) {
    Fiber* fiber = self();
    finish_copies(fiber, fiber->copy_groups > n ? fiber->copy_groups - n : 0, false);
}

// The copies and the arrival complete as late as the memory model allows. ThreadSanitizer sees only the reads of the copies. The arrival
// releases none of this thread's other writes.
void cp_async_mbarrier_arrive(u64* bar) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    checked(block, bar, "cp_async_mbarrier_arrive");
    const u8 slot = slot_of(block, bar);
    for (Copy& copy : fiber->copies) {
        if (copy.slot != NO_SLOT) continue;
        if (copy.valid) tsan::reads(copy.from, 16);
        copy.slot = slot, copy.phase = block.mbarriers[slot].phases + 1;
    }
    const AsyncArrival arrival{fiber, bar, fiber->copies_issued, block.switches + 1 + block.random.below(4 * block.threads)};
    if (!copies_in_flight(block) || arrival.due < block.next_load_due) block.next_load_due = arrival.due;
    block.arrivals.push_back(arrival);
    std::push_heap(block.arrivals.begin(), block.arrivals.end(), later);
}

void fence_proxy_async() {
    Fiber* fiber = self();
    for (u32 piece : fiber->unfenced) {
        if (fiber->owner->written[piece].thread == fiber->thread + 1) fiber->owner->written[piece] = {};
    }
    fiber->unfenced.clear();
    for (u32 i = 0; i < MBARRIERS; ++i) fiber->fenced[i] = fiber->waited[i];
}

void (*prefetch_hook)(const void*) = nullptr;

void mbarrier_init(u64* bar, u32 count) {
    Block& block = *self()->owner;
    block.check_shared(bar, 8, 8, "mbarrier_init");
    if (count == 0 || count > MAX_THREADS) block.fail("an mbarrier for %u arrivals", count);
    MbarrierSlot* free = nullptr;
    for (MbarrierSlot& slot : block.mbarriers) {
        if (slot.bar == bar) block.fail("mbarrier_init of an mbarrier in use");
        if (!slot.bar && !free) free = &slot;
    }
    if (!free) block.fail("more than %u mbarriers", MBARRIERS);
    free->bar = bar;
    *reinterpret_cast<Mbarrier*>(bar) = {MBARRIER_TAG, u16(count), u16(count), 0};
}

void mbarrier_inval(u64* bar) {
    Block& block = *self()->owner;
    checked(block, bar, "mbarrier_inval");
    for (u32 i = 0; i < block.threads; ++i) {
        const Fiber& fiber = *block.fibers[i];
        if (fiber.wait == Wait::MBARRIER && fiber.wait_on == bar) block.fail("mbarrier_inval of one for which thread %u waits", i);
    }
    for (const TmaLoad& load : block.loads) {
        if (load.bar == bar) block.fail("mbarrier_inval of one that counts a tma_load_2d in flight");
    }
    for (const AsyncArrival& arrival : block.arrivals) {
        if (arrival.bar == bar) block.fail("mbarrier_inval of one that counts cp.async of thread %u in flight", arrival.fiber->thread);
    }
    block.mbarriers[slot_of(block, bar)].bar = nullptr;
    reinterpret_cast<Mbarrier*>(bar)->tag = 0;
}

void mbarrier_arrive(u64* bar, u32 count) { arrive(*self()->owner, bar, count, 0); }
void mbarrier_arrive_expect(u64* bar, u32 bytes) { arrive(*self()->owner, bar, 1, bytes); }

bool mbarrier_test(u64* bar, u32 parity) {
    Fiber* fiber = self();
    const Mbarrier* mbarrier = checked(*fiber->owner, bar, "mbarrier_test");
    if ((mbarrier->tag & 1) == (parity & 1)) return false;
    const u8 slot = slot_of(*fiber->owner, bar);
    fiber->waited[slot] = fiber->owner->mbarriers[slot].phases;
    tsan::acquire(sync_of(bar, parity));
    return true;
}

void mbarrier_wait(u64* bar, u32 parity) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    while (!mbarrier_test(bar, parity)) block.wait(fiber, Wait::MBARRIER, bar, parity & 1);
}

void tma_load_2d(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row) {
    begin_load(*self()->owner, checked_load(smem, map, bar, col, row, nullptr));
}

void tma_load_3d(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, i32 item) {
    begin_load(*self()->owner, checked_load(smem, map, bar, col, row, &item));
}

}  // namespace aristos::dev
