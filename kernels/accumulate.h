// aristos_accumulate: sum = last if `begin`, otherwise sum += last. Both hold all gradients of a layer as one f32 vector, in whole 16-byte
// pieces.
#pragma once
#include "route_math.h"

namespace aristos {

KERNEL(aristos_accumulate, ROUTE_THREADS, 4)(float* sum, const float* last, u64 count, u32 begin) {
    const u64 step = u64(dev::blocks()) * dev::threads() * 4;
    for (u64 i = (u64(dev::block()) * dev::threads() + dev::thread()) * 4; i < count; i += step) {
        Vec16 add = dev::load16(last + i);
        if (!begin) {
            const Vec16 before = dev::load16(sum + i);
            UNROLL
            for (u32 e = 0; e < 4; e++) add.w[e] = float_bits(bits_float(before.w[e]) + bits_float(add.w[e]));
        }
        dev::store16(sum + i, add);
    }
}
REGISTER_KERNEL(aristos_accumulate)

}  // namespace aristos
