// Routing, plan, their backward, and the all-reduce: one module, for every architecture.
#include "route.h"
#include "plan.h"
#include "route_backward.h"
#include "router_gradients.h"
#include "all_reduce.h"
