// TMA stores. A seeded generator chooses when they take effect. Shared memory is read at the store or at the wait for its reads. Global
// memory is written at one of these moments or at the wait for completion. A store that is never waited for is never written.
#include "fragments.h"
#include "simt.h"

namespace aristos::host {

namespace {

void read_box(Block& block, const Map& map, BulkStore& store) {
    const u32 bytes = map.box_rows * map.box_cols * map.element_bytes;
    tsan::reads(store.from, bytes);
    store.read.resize(bytes);
    const u32 first = block.shared_address(store.from);
    for (u32 at = 0; at < bytes; at += 16) __builtin_memcpy(store.read.data() + at, block.window + swizzled_128b(first + at), 16);
}

void write_box(const Map& map, BulkStore& store) {
    const long long wide = map.box_cols;
    for (u32 r = 0; r < map.box_rows; ++r) {
        const long long row = store.row + static_cast<long long>(r);
        if (row < 0 || row >= map.rows) continue;
        const long long begin = store.col < 0 ? 0 : store.col, end = store.col + wide < map.cols ? store.col + wide : map.cols;
        if (begin >= end) continue;
        char* to = reinterpret_cast<char*>(map.base) + u64(row) * map.row_stride_bytes + begin * map.element_bytes;
        const u64 bytes = u64(end - begin) * map.element_bytes;
        tsan::writes(to, bytes);
        __builtin_memcpy(to, store.read.data() + (r * wide + begin - store.col) * map.element_bytes, bytes);
    }
    store.written = true;
}

Map map_of(const BulkStore& store) {
    Map map;
    __builtin_memcpy(&map, store.map, sizeof map);
    return map;
}

}  // namespace

void check_no_stores(Fiber* fiber) {
    if (!fiber->stores.empty()) fiber->owner->fail("thread %u ends without waiting for its tma_store_2d", fiber->thread);
}

}  // namespace aristos::host

namespace aristos::dev {

using namespace host;

void tma_store_2d(const TensorMap* map, i32 col, i32 row, const void* smem) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    const Map read = read_map(map, "stores");
    const u32 bytes = read.box_rows * read.box_cols * read.element_bytes;
    block.check_shared(smem, bytes, 128, "tma_store_2d's source");
    for (u32 piece = block.shared_address(smem) / 16, end = piece + bytes / 16; piece < end; ++piece) {
        if (block.written[piece].thread != 0) {
            block.fail("tma_store_2d reads data of thread %u, without fence_proxy_async in between", block.written[piece].thread - 1);
        }
    }
    fiber->stores.push_back({static_cast<const char*>(smem), {}, col, row, fiber->bulk_groups, false, {}});
    BulkStore& store = fiber->stores.back();
    __builtin_memcpy(store.map, map, sizeof store.map);
    const u32 early = block.random.below(3);
    if (early > 0) read_box(block, read, store);
    if (early > 1) write_box(read, store);
}

void bulk_commit() { ++self()->bulk_groups; }

void bulk_wait_group(u32 n, bool read) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    const u32 through = fiber->bulk_groups > n ? fiber->bulk_groups - n : 0;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < fiber->stores.size(); ++i) {
        BulkStore& store = fiber->stores[i];
        if (store.group < through) {
            const Map map = map_of(store);
            if (store.read.empty()) read_box(block, map, store);
            if (!store.written && (!read || block.random.below(4) == 0)) write_box(map, store);
            if (!read) continue;
        }
        if (kept != i) fiber->stores[kept] = std::move(store);
        ++kept;
    }
    fiber->stores.resize(kept);
}

}  // namespace aristos::dev
