// Persistent kernels with mma.sync and small tiles, two blocks per SM: for problems with too few large tiles.
#include "layer_kernels.h"
#include "path_ampere.h"

namespace aristos {
using namespace dev;

template <class T, u32 KINDS> using Ampere64x128 = AmperePath<T, AmpereTile<64, 128>, KINDS>;
LAYER_KERNELS(KERNEL, REGISTER_KERNEL, _64x128, Ampere64x128, 128, 2)

}  // namespace aristos
