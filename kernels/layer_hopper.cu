// Persistent kernels with TMA and wgmma, for sm_90a.
#include "layer_kernels.h"
#include "path_hopper.h"

namespace aristos {
using namespace dev;

template <class T, u32 KINDS> using Hopper128x256 = HopperPath<T, KINDS, 256>;
LAYER_KERNELS(KERNEL, REGISTER_KERNEL, _hopper, Hopper128x256, hopper::THREADS, 1)

}  // namespace aristos
