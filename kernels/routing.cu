// Routing, plan, their backward, the all-reduce, and the sum over passes: one module, for every architecture.
#include "route.h"
#include "plan.h"
#include "route_backward.h"
#include "router_gradients.h"
#include "all_reduce.h"
#include "take_routing.h"
#include "accumulate.h"
