// ldmatrix, stmatrix, mma and wgmma. See fragments.h for layouts and wgmma.h for the timing of wgmma.
#include <cmath>

#include "fragments.h"
#include "simt.h"

namespace aristos::host {

Work work;

namespace {

// Explicit vectors, because the compiler would vectorise these loops over k, with gathers.
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats16 __attribute__((vector_size(64), may_alias));

float element(u32 bits, bool bf16) { return bf16 ? dev::to_float(Bf16{u16(bits)}) : dev::to_float(F16{u16(bits)}); }

// One warp's m16n8k16.
template <bool BF16> void multiply_warp(const std::unique_ptr<Fiber>* lanes) {
    work.products.fetch_add(1, std::memory_order_relaxed);
    alignas(64) float a[16][16], b[16][8], d[16][8];
    const auto at = [](auto& matrix, Coord coord) -> float& { return matrix[coord.row][coord.col]; };
    for (u32 lane = 0; lane < 32; ++lane) {
        const Operands& o = lanes[lane]->operands;
        for (u32 i = 0; i < 4; ++i) {
            at(a, mma_a(lane, i, 0)) = element(o.a[i] & 0xffff, BF16);
            at(a, mma_a(lane, i, 1)) = element(o.a[i] >> 16, BF16);
            at(d, mma_d(lane, i)) = o.d[i];
        }
        for (u32 i = 0; i < 2; ++i) {
            at(b, mma_b(lane, i, 0)) = element(o.b[i] & 0xffff, BF16);
            at(b, mma_b(lane, i, 1)) = element(o.b[i] >> 16, BF16);
        }
    }
    for (u32 m = 0; m < 16; ++m) {
        Floats8 sum;
        __builtin_memcpy(&sum, d[m], sizeof sum);
        for (u32 k = 0; k < 16; ++k) {
            Floats8 line;
            __builtin_memcpy(&line, b[k], sizeof line);
            sum += a[m][k] * line;
        }
        __builtin_memcpy(d[m], &sum, sizeof sum);
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        const Operands& o = lanes[lane]->operands;
        for (u32 i = 0; i < 4; ++i) o.d[i] = at(d, mma_d(lane, i));
    }
}

void load_matrices(const void* smem_row, u32* registers, bool transposed) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    block.check_shared(smem_row, 16, 16, "ldmatrix's row");
    Operands& mine = fiber->operands;
    tsan::reads(smem_row, 16);
    __builtin_memcpy(mine.row, smem_row, 16);
    mine.registers = registers;
    if (!block.arrive_at_warp_op(fiber, transposed ? Wait::LDMATRIX_TRANS : Wait::LDMATRIX)) return;
    const std::unique_ptr<Fiber>* lanes = &block.fibers[fiber->thread / 32 * 32];
    for (u32 i = 0; i < 4; ++i) {
        u16 matrix[8][8];
        for (u32 row = 0; row < 8; ++row) __builtin_memcpy(matrix[row], lanes[8 * i + row]->operands.row, 16);
        for (u32 lane = 0; lane < 32; ++lane) {
            const Coord lo = ldmatrix(lane, 0, transposed), hi = ldmatrix(lane, 1, transposed);
            lanes[lane]->operands.registers[i] = u32(matrix[lo.row][lo.col]) | u32(matrix[hi.row][hi.col]) << 16;
        }
    }
    block.warp_done(fiber);
}

// The last lane to arrive writes all rows. ThreadSanitizer and the fence checks count the lane that gave a row's address as its writer.
void store_matrices(void* smem_row, const u32* registers) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    block.check_shared(smem_row, 16, 16, "stmatrix's row");
    tsan::writes(smem_row, 16);
    const u32 piece = block.shared_address(smem_row) / 16;
    fiber->operands.to = smem_row;
    fiber->operands.a = registers;
    fiber->unfenced.push_back(piece);
    block.written[piece] = {u16(fiber->thread + 1), NO_SLOT, false, false, 0};
    if (!block.arrive_at_warp_op(fiber, Wait::STMATRIX)) return;
    const std::unique_ptr<Fiber>* lanes = &block.fibers[fiber->thread / 32 * 32];
    for (u32 i = 0; i < 4; ++i) {
        u16 matrix[8][8];
        for (u32 lane = 0; lane < 32; ++lane) {
            for (u32 half = 0; half < 2; ++half) {
                const Coord at = stmatrix(lane, half);
                matrix[at.row][at.col] = u16(lanes[lane]->operands.a[i] >> 16 * half);
            }
        }
        for (u32 row = 0; row < 8; ++row) __builtin_memcpy(lanes[8 * i + row]->operands.to, matrix[row], 16);
    }
    block.warp_done(fiber);
}

// ---- wgmma

// Reads `rows` x 16 elements of an operand to out[k][row].
void read_operand(Block& block, const WgmmaOp& op, u64 descriptor, u32 rows, bool trans, bool bf16, float* out) {
    if (descriptor >> 62 != 1) block.fail("a wgmma descriptor without the 128-byte swizzle: %llx",
                                          static_cast<unsigned long long>(descriptor));
    const u32 end = SHARED_START + block.launch->shared_bytes;
    const auto piece = [&](u32 r, u32 k, u16 (&values)[8]) {
        const u32 at = wgmma_operand(descriptor, r, k, trans);
        if (at < SHARED_START || at + 16 > end) {
            block.fail("a wgmma operand reaches %lld bytes into shared memory of %u bytes (descriptor %llx)",
                       static_cast<long long>(at) - SHARED_START, block.launch->shared_bytes,
                       static_cast<unsigned long long>(descriptor));
        }
        Written& written = block.written[at / 16];
        if (written.thread != 0) {
            if (written.slot == NO_SLOT || op.fenced[written.slot] < written.phase) {
                block.fail("wgmma reads data of thread %u at %u, without fence_proxy_async in between",
                           written.thread - 1, at - SHARED_START);
            }
            written.seen = true;
        }
        __builtin_memcpy(values, block.window + at, 16);
    };
    u16 values[8];
    if (trans) {
        for (u32 k = 0; k < 16; ++k) {
            for (u32 r = 0; r < rows; r += 8) {
                piece(r, k, values);
                for (u32 i = 0; i < 8; ++i) out[k * rows + r + i] = element(values[i], bf16);
            }
        }
    } else {
        for (u32 r = 0; r < rows; ++r) {
            for (u32 k = 0; k < 16; k += 8) {
                piece(r, k, values);
                for (u32 i = 0; i < 8; ++i) out[(k + i) * rows + r] = element(values[i], bf16);
            }
        }
    }
}

void execute(Block& block, const WgmmaOp& op) {
    alignas(64) float a[16 * 64], b[16 * 256];
    read_operand(block, op, op.desc_a, 64, op.trans_a, op.bf16, a);
    read_operand(block, op, op.desc_b, op.n, op.trans_b, op.bf16, b);
    float* values = op.accumulators->values.data();
    for (u32 n0 = 0; n0 < op.n; n0 += 64) {
        for (u32 m = 0; m < 64; ++m) {
            float* row = values + m * op.n + n0;
            Floats16 sum[4] = {};
            if (op.accumulate) __builtin_memcpy(sum, row, sizeof sum);
            for (u32 k = 0; k < 16; ++k) {
                const Floats16* line = reinterpret_cast<const Floats16*>(b + k * op.n + n0);
                const float factor = a[k * 64 + m];
                for (u32 i = 0; i < 4; ++i) sum[i] += factor * line[i];
            }
            __builtin_memcpy(row, sum, sizeof sum);
        }
    }
}

WgmmaGroup& group_of(Fiber* fiber) { return fiber->owner->warpgroups[fiber->thread / WARPGROUP]; }

// Executes all wgmmas up to number `through` that all threads have issued.
void execute_through(Block& block, WgmmaGroup& group, u64 through) {
    while (group.done < through && group.done - group.first < group.ops.size()) {
        const WgmmaOp& op = group.ops[group.done - group.first];
        if (op.arrived < WARPGROUP) break;
        execute(block, op);
        ++group.done;
    }
    if (group.done - group.first == group.ops.size()) {
        group.first = group.done;
        group.ops.clear();
    }
}

// Borrows the accumulators `acc` from `fiber`, unless they are borrowed already.
Accumulators* borrow(Fiber* fiber, WgmmaGroup& group, Accumulators* expected, float* acc, u32 n) {
    const u32 t = fiber->thread % WARPGROUP;
    Accumulators* found = expected;
    if (!found) {
        for (auto& candidate : group.accumulators) {
            if (candidate->of_thread[t] == acc) found = candidate.get();
        }
    }
    if (!found) {
        for (auto& candidate : group.accumulators) {
            if (candidate->n == 0) found = candidate.get();
        }
        if (!found) {
            group.accumulators.push_back(std::make_unique<Accumulators>());
            found = group.accumulators.back().get();
        }
        found->n = n;
        found->open = 0;
        found->values.resize(64 * n);
        for (float*& pointer : found->of_thread) pointer = nullptr;
    }
    if (found->of_thread[t] == nullptr) {
        if (!fiber->wgmma.fenced) fiber->owner->fail("thread %u: wgmma on accumulators without wgmma_fence before", fiber->thread);
        for (u32 i = 0; i < n / 2; ++i) {
            const Coord coord = wgmma_d(t, i);
            found->values[coord.row * n + coord.col] = acc[i];
            acc[i] = NAN;
        }
        found->of_thread[t] = acc;
        ++found->open;
        ++fiber->wgmma.borrowed;
    } else if (found->of_thread[t] != acc || found->n != n) {
        fiber->owner->fail("thread %u: wgmma on other accumulators than the rest of the warpgroup", fiber->thread);
    }
    found->last_use[t] = fiber->wgmma.issued;
    return found;
}

// Returns to `fiber` the accumulators whose last wgmma is before number `through`.
void return_accumulators(Fiber* fiber, WgmmaGroup& group, u64 through) {
    const u32 t = fiber->thread % WARPGROUP;
    for (auto& accumulators : group.accumulators) {
        const u32 n = accumulators->n;
        if (n == 0 || !accumulators->of_thread[t] || accumulators->last_use[t] > through) continue;
        float* acc = accumulators->of_thread[t];
        for (u32 i = 0; i < n / 2; ++i) {
            const Coord coord = wgmma_d(t, i);
            acc[i] = accumulators->values[coord.row * n + coord.col];
        }
        accumulators->of_thread[t] = nullptr;
        --fiber->wgmma.borrowed;
        if (--accumulators->open == 0) accumulators->n = 0;
    }
}

}  // namespace

}  // namespace aristos::host

namespace aristos::dev {

using namespace host;

void ldmatrix_x4(u32 (&r)[4], const void* smem_row) { load_matrices(smem_row, r, false); }
void ldmatrix_x4_trans(u32 (&r)[4], const void* smem_row) { load_matrices(smem_row, r, true); }
void stmatrix_x4(void* smem_row, const u32 (&r)[4]) { store_matrices(smem_row, r); }

void mma_16x8x16(float* d, const u32* a, const u32* b, bool bf16) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    fiber->operands.d = d;
    fiber->operands.a = a;
    fiber->operands.b = b;
    if (!block.arrive_at_warp_op(fiber, bf16 ? Wait::MMA_BF16 : Wait::MMA_F16)) return;
    const std::unique_ptr<Fiber>* lanes = &block.fibers[fiber->thread / 32 * 32];
    if (bf16) multiply_warp<true>(lanes);
    else multiply_warp<false>(lanes);
    block.warp_done(fiber);
}

u64 smem_descriptor(const void* smem, u32 lbo_bytes, u32 sbo_bytes) {
    const u32 at = self()->owner->shared_address(smem);
    if (at % 16 != 0 || lbo_bytes % 16 != 0 || sbo_bytes % 16 != 0 || lbo_bytes >= 1 << 18 || sbo_bytes >= 1 << 18) {
        self()->owner->fail("a wgmma descriptor of address %u, strides %u and %u", at, lbo_bytes, sbo_bytes);
    }
    return u64(at >> 4 & 0x3fff) | u64(lbo_bytes >> 4) << 16 | u64(sbo_bytes >> 4) << 32 | u64(1) << 62;
}

void wgmma_fence() { self()->wgmma.fenced = true; }

void wgmma_64xnx16(float* acc, u32 n, u64 desc_a, u64 desc_b, bool accumulate, bool bf16, bool trans_a, bool trans_b) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    WgmmaGroup& group = group_of(fiber);
    if (fiber->thread / WARPGROUP * WARPGROUP + WARPGROUP > fiber->threads) {
        block.fail("thread %u is not in a whole warpgroup", fiber->thread);
    }
    const u64 number = fiber->wgmma.issued++;
    if (number - group.first == group.ops.size()) {
        group.ops.push_back({desc_a, desc_b, n, 0, accumulate, bf16, trans_a, trans_b, nullptr, {}});
        for (u32& fenced : group.ops.back().fenced) fenced = ~0u;
    }
    WgmmaOp& op = group.ops[number - group.first];
    if (op.desc_a != desc_a || op.desc_b != desc_b || op.n != n || op.accumulate != accumulate || op.bf16 != bf16 ||
        op.trans_a != trans_a || op.trans_b != trans_b) {
        block.fail("thread %u issues a wgmma with other operands than the rest of its warpgroup", fiber->thread);
    }
    for (u32 i = 0; i < MBARRIERS; ++i) {
        if (fiber->fenced[i] < op.fenced[i]) op.fenced[i] = fiber->fenced[i];
    }
    op.accumulators = borrow(fiber, group, op.accumulators, acc, n);
    if (++op.arrived < WARPGROUP) return;
    if (block.random.next() % 4 == 0) execute_through(block, group, number + 1);
    const u32 first = fiber->thread / WARPGROUP * WARPGROUP;
    for (u32 i = first; i < first + WARPGROUP; ++i) {
        Fiber* other = block.fibers[i].get();
        if (other->wait == Wait::WGMMA && other->wait_value <= number + 1) block.wake(other);
    }
}

void wgmma_commit() {
    WgmmaThread& thread = self()->wgmma;
    thread.group_end[thread.groups++ % 16] = thread.issued;
}

void wgmma_wait_group(u32 n) {
    Fiber* fiber = self();
    Block& block = *fiber->owner;
    WgmmaThread& thread = fiber->wgmma;
    if (n > 7) block.fail("wgmma_wait<%u>: at most 7", n);
    thread.fenced = false;
    if (thread.groups <= n) return;
    const u64 through = thread.group_end[(thread.groups - n - 1) % 16];
    WgmmaGroup& group = group_of(fiber);
    execute_through(block, group, through);
    while (group.done < through) {
        block.wait(fiber, Wait::WGMMA, nullptr, through);
        execute_through(block, group, through);
    }
    return_accumulators(fiber, group, through);
}

}  // namespace aristos::dev
