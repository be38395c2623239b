// Where everything of a layer lies: one walk over a shape gives the sizes (with bases of 0) and the addresses.
#pragma once
#include <type_traits>

#include "layer.h"

namespace aristos {

// Hands out addresses from `base` up. Kernels copy by 16 bytes, TMA wants 128, and 256 keeps unrelated words in different lines.
struct Bump {
    u64 base;
    u64 used = 0;

    template <typename T>
    void allocate(T*& pointer, u64 count) {
        pointer = reinterpret_cast<T*>(base + used);
        u64 bytes = 1;
        if constexpr (!std::is_void_v<T>) bytes = sizeof(T);
        used += (count * bytes + 255) / 256 * 256;
    }
};

// 0, or the number (from 1) of the invalid field of LayerShape.
int check_shape(const LayerShape& shape);
Sizes layer_sizes(const LayerShape& shape, bool hopper);
// Fills the pointers of `layer`, whose shape, tables and sizes are set. `local` and `symmetric` begin at their bases.
// Local words that must start as zero come first: `zero_bytes` of them. Symmetric ones are `signal_bytes` from byte `signals` on.
void place_layer(Layer& layer, Bump& local, Bump& symmetric, u64& zero_bytes, u64& signals, u64& signal_bytes);

}  // namespace aristos
