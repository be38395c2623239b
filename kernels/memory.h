// Memory layout of a layer: one walk over the shape computes sizes (with zero bases) or addresses.
#pragma once
#include <type_traits>

#include "layer.h"

namespace aristos {

// Hands out ascending addresses from `base`. Kernels copy 16 bytes, TMA needs 128, and 256 keeps unrelated words in different cache
// lines.
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

// Returns 0, or the 1-based number of the invalid field of LayerShape.
int check_shape(const LayerShape& shape);
Sizes layer_sizes(const LayerShape& shape, bool hopper);
// Sets the pointers of `layer`; its shape, tables and sizes must be set. `local` and `symmetric` begin at their bases. The first
// `zero_bytes` of local memory must be zeroed, and the `signal_bytes` of symmetric memory from offset `signals` on.
void place_layer(Layer& layer, Bump& local, Bump& symmetric, u64& zero_bytes, u64& signals, u64& signal_bytes);

}  // namespace aristos
