// Persistent kernels with mma.sync, for sm_80 and later.
#include "layer_kernels.h"
#include "path_ampere.h"

namespace aristos {
using namespace dev;

template <class T, u32 KINDS> using Ampere128x256 = AmperePath<T, AmpereTile<128, 256>, KINDS>;
LAYER_KERNELS(KERNEL, REGISTER_KERNEL, , Ampere128x256, 256, 1)

}  // namespace aristos
