// Persistent kernels with TMA, wgmma and CTA pairs, which read weights once for two blocks: for batches of many rows.
#include "layer_kernels.h"
#include "path_hopper.h"

namespace aristos {
using namespace dev;

template <class T, u32 KINDS> using Hopper256x256 = HopperPath<T, KINDS, 256, 2>;
LAYER_KERNELS(CLUSTER_KERNEL, REGISTER_CLUSTER_KERNEL, _hopper_256x256, Hopper256x256, hopper::THREADS)

}  // namespace aristos
