// Routing, plan, their backward, the sums over PEs and gradient accumulation: one module for all architectures.
#include "route.h"
#include "plan.h"
#include "route_backward.h"
#include "router_gradients.h"
#include "all_reduce.h"
#include "sum_losses.h"
#include "take_routing.h"
#include "accumulate.h"
