// The persistent kernels by TMA and wgmma: sm_90a.
#include "pass.h"
#include "path_hopper.h"

namespace aristos {
using namespace dev;

KERNEL(aristos_forward_hopper, HOPPER_THREADS, 1)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) run_pass<HopperPath<Bf16>>(*layer, pass, false);
    else run_pass<HopperPath<F16>>(*layer, pass, false);
}
REGISTER_KERNEL(aristos_forward_hopper)

KERNEL(aristos_backward_hopper, HOPPER_THREADS, 1)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) run_pass<HopperPath<Bf16>>(*layer, pass, true);
    else run_pass<HopperPath<F16>>(*layer, pass, true);
}
REGISTER_KERNEL(aristos_backward_hopper)

}  // namespace aristos
