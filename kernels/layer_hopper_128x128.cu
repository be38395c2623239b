// Persistent kernels with TMA, wgmma and narrow tiles: for sizes that would leave much of a wide tile empty, or too few wide tiles.
#include "layer_kernels.h"
#include "path_hopper.h"

namespace aristos {
using namespace dev;

template <class T, u32 KINDS> using Hopper128x128 = HopperPath<T, KINDS, 128>;
LAYER_KERNELS(KERNEL, REGISTER_KERNEL, _hopper_128x128, Hopper128x128, hopper::THREADS, 1)

}  // namespace aristos
