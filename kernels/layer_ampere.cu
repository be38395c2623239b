// The persistent kernels by mma.sync: sm_80 and later.
#include "pass.h"
#include "path_ampere.h"

namespace aristos {
using namespace dev;

KERNEL(aristos_forward, AMPERE_THREADS, 1)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) run_pass<AmperePath<Bf16>>(*layer, pass, false);
    else run_pass<AmperePath<F16>>(*layer, pass, false);
}
REGISTER_KERNEL(aristos_forward)

KERNEL(aristos_backward, AMPERE_THREADS, 1)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) run_pass<AmperePath<Bf16>>(*layer, pass, true);
    else run_pass<AmperePath<F16>>(*layer, pass, true);
}
REGISTER_KERNEL(aristos_backward)

}  // namespace aristos
